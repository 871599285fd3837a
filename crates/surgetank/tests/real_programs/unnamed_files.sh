# Files without a name: O_TMPFILE with a later link, and files that are unlinked while open.
"$PYTHON" - <<'P'
import os
os.mkdir("results")
descriptor = os.open("results", os.O_TMPFILE | os.O_RDWR, 0o640)
os.write(descriptor, b"written before it had a name\n")
print(os.listdir("results"), os.fstat(descriptor).st_nlink)
os.link(f"/proc/self/fd/{descriptor}", "results/named", follow_symlinks=True)
print(os.listdir("results"), os.fstat(descriptor).st_nlink)
os.write(descriptor, b"and after\n")
os.close(descriptor)
print(open("results/named").read())

never = os.open(".", os.O_TMPFILE | os.O_RDWR)
os.write(never, b"x" * 50_000)
os.close(never)

with open("unlinked", "w+b") as file:
    file.write(b"a" * 10_000)
    file.flush()
    os.unlink("unlinked")
    print(os.path.exists("unlinked"), os.fstat(file.fileno()).st_nlink)
    file.write(b"b" * 10_000)
    file.seek(9_999)
    print(file.read(2), os.fstat(file.fileno()).st_size)
    with open(f"/proc/self/fd/{file.fileno()}", "rb") as again:
        print(len(again.read()))

with open("old", "w") as file:
    file.write("first\n")
keeper = open("old")
with open("new", "w") as file:
    file.write("second\n")
os.rename("new", "old")
print(keeper.read(), open("old").read(), sep="")
with open("reborn", "w") as gone:
    os.unlink("reborn")
    with open("reborn", "w") as file:
        file.write("a new file of the same name\n")
    gone.write("unnamed")
print(open("reborn").read())
P
