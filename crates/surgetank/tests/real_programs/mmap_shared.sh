# A shared map outlives its descriptor; data written through it is in the file.
"$PYTHON" - <<'P'
import mmap, os
with open("shared", "w+b") as file:
    file.truncate(300_000)
    view = mmap.mmap(file.fileno(), 0)
view[0:5] = b"first"
child = os.fork()
if child == 0:
    view[100_000:100_005] = b"child"
    os._exit(0)
os.waitpid(child, 0)
with open("shared", "rb") as reader:
    reader.seek(100_000)
    print("a reader sees:", reader.read(5))
with open("shared", "r+b") as writer:
    writer.seek(200_000)
    writer.write(b"plain")
print("the map sees:", view[200_000:200_005])
view[299_995:300_000] = b"last!"
view.close()
print(open("shared", "rb").read()[-5:])

with open("private", "w+b") as file:
    file.write(b"unchanged" * 1000)
    file.flush()
    with mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE) as view:
        view[0:9] = b"scribbles"
print(open("private", "rb").read(9))

with open("grown", "w+b") as file:
    file.write(b"x" * 4096)
    file.flush()
    view = mmap.mmap(file.fileno(), 4096)
    file.truncate(50_000)
    view.resize(50_000)
    view[49_999:] = b"e"
    view.close()
print(os.path.getsize("grown"), open("grown", "rb").read()[-1:])
P
