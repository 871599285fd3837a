# Python's standard library: pathlib, shutil, tempfile, atomic replacement, memory maps, sqlite3, zip archives.
"$PYTHON" - <<'P'
import mmap, os, shutil, sqlite3, tempfile, zipfile
from pathlib import Path

root = Path("work")
(root / "a" / "b").mkdir(parents=True)
for n in range(50):
    (root / "a" / f"{n:02}.txt").write_text(f"{n}\n" * n)
print(len(list(root.rglob("*.txt"))), sum(path.stat().st_size for path in root.rglob("*.txt")))

shutil.copytree(root / "a", root / "copy")
shutil.move(root / "copy" / "01.txt", root / "a" / "b" / "01.txt")
shutil.make_archive("archive", "tar", root, "copy")
shutil.rmtree(root / "copy")
os.remove("archive.tar")  # it holds the time of its making
print(sorted(os.listdir(root)))

with tempfile.NamedTemporaryFile("w", dir=root, delete=False) as part:
    part.write("complete\n")
    part.flush()
    os.fsync(part.fileno())
os.replace(part.name, root / "result")
with tempfile.TemporaryFile(dir=root) as unnamed:
    unnamed.write(b"x" * 100_000)
    unnamed.seek(0)
    print(len(unnamed.read()))
with tempfile.TemporaryDirectory(dir=root) as directory:
    Path(directory, "file").write_text("gone soon")

with open(root / "mapped", "w+b") as file:
    file.truncate(1 << 20)
    with mmap.mmap(file.fileno(), 0) as view:
        view[4096:4101] = b"hello"
        view[-1:] = b"!"
        view.flush()
print((root / "mapped").read_bytes()[4096:4101], (root / "mapped").stat().st_size)

database = sqlite3.connect(root / "table.db")
with database:
    database.execute("CREATE TABLE t(n INTEGER)")
    database.executemany("INSERT INTO t VALUES(?)", [(n,) for n in range(1000)])
database.close()
print(sqlite3.connect(root / "table.db").execute("SELECT sum(n) FROM t").fetchone())

with zipfile.ZipFile(root / "files.zip", "w") as archive:
    for path in sorted((root / "a").glob("*.txt")):
        archive.writestr(zipfile.ZipInfo(path.name, (2000, 1, 1, 0, 0, 0)), path.read_bytes())
with zipfile.ZipFile(root / "files.zip", "a") as archive:
    archive.writestr(zipfile.ZipInfo("late", (2000, 1, 1, 0, 0, 0)), "appended")
with zipfile.ZipFile(root / "files.zip") as archive:
    print(archive.testzip(), len(archive.namelist()))

os.utime(root / "result", ns=(1_000_000_000_123_456_789, 1_000_000_000_987_654_321))
print((root / "result").stat().st_mtime_ns)
descriptor = os.open(root / "appended", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_EXCL, 0o640)
for n in range(100):
    os.write(descriptor, f"{n} ".encode())
os.close(descriptor)
try:
    os.open(root / "appended", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
except FileExistsError as error:
    print(error.errno)
print(os.stat(root / "appended").st_size, oct(os.stat(root / "appended").st_mode))
P
