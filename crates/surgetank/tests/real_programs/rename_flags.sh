# renameat2's flags, directories over directories, and calls that must be refused.
"$PYTHON" - <<'P'
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
NOREPLACE, EXCHANGE = 1, 2

def rename(old, new, flags):
    done = libc.renameat2(-100, old.encode(), -100, new.encode(), flags)
    return "done" if done == 0 else errno.errorcode[ctypes.get_errno()]

def plain(old, new):
    try:
        os.rename(old, new)
        return "done"
    except OSError as error:
        return errno.errorcode[error.errno]

for name in "abc":
    open(name, "w").write(name)
print("noreplace, taken:", rename("a", "b", NOREPLACE))
print("noreplace, free:", rename("a", "free", NOREPLACE))
print("exchange:", rename("b", "c", EXCHANGE), open("b").read(), open("c").read())
print("exchange with nothing:", rename("b", "missing", EXCHANGE))
os.makedirs("full/inside")
os.makedirs("empty")
open("full/inside/file", "w").write("deep")
print("exchange of a file and a directory:", rename("b", "full", EXCHANGE), os.path.isfile("full"), os.listdir("b"))
print("directory over a full one:", plain("empty", "b"))
os.mkdir("empty/now-full")
os.mkdir("target")
print("directory over an empty one:", plain("b", "target"), os.listdir("target"))
print("into itself:", plain("target", "target/inside/deeper"))
print("file over directory:", plain("c", "target"))
print("directory over file:", plain("target", "c"))
os.link("free", "also-free")
print("onto its own other name:", plain("free", "also-free"), os.path.exists("free"))
print("missing:", plain("nowhere", "c"))
os.makedirs("x/y/z")
open("x/y/z/f", "w").write("f")
os.chdir("x/y/z")
print("a parent moves under us:", plain("../../../x", "../../../moved"), os.listdir("."), os.getcwd().endswith("moved/y/z"))
open("g", "w").write("after the move")
P
