# Like tar and rsync: mode, owner and times are set through the descriptor of a new file, before its close.
"$PYTHON" - <<'P'
import os, subprocess

def seen(path, descriptor):
    def of(stat):
        return oct(stat.st_mode), stat.st_uid == os.getuid(), stat.st_gid == os.getgid(), stat.st_atime_ns, stat.st_mtime_ns, stat.st_size
    by_path, by_descriptor = of(os.stat(path)), of(os.fstat(descriptor))
    assert by_path == by_descriptor, (by_path, by_descriptor)
    # A program without the shim uses the mount.
    other = subprocess.run(["stat", "-c", "%a %X %Y %s", path], capture_output=True, text=True, check=True,
                           env=os.environ | {"SURGETANK_PRELOAD": "0"})
    return by_path, other.stdout.strip()

OLD, OLDER = 1_000_000_000_000_000_005, 999_999_999_000_000_007
descriptor = os.open("made", os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
os.write(descriptor, b"hello")
os.fchown(descriptor, os.getuid(), os.getgid())
os.utime(descriptor, ns=(OLDER, OLD))
for mode in (0o664, 0o755, 0o444, 0o640, 0o4755, 0o2600, 0o604, 0o000, 0o666):
    os.fchmod(descriptor, mode)
    print(oct(mode), seen("made", descriptor))
os.utime(descriptor, ns=(OLD, OLDER))
os.fchmod(descriptor, 0o604)
# A second descriptor, which cannot write, and a chmod by name.
reader = os.open("made", os.O_RDONLY)
os.fchmod(reader, 0o640)
print("by a reader", seen("made", descriptor))
os.chmod("made", 0o620)
print("by name", seen("made", descriptor))
os.utime("made", ns=(OLDER, OLDER))
print("times by name", seen("made", descriptor))
os.close(reader)
os.fchmod(descriptor, 0o664)
os.utime(descriptor, ns=(OLD, OLD))
os.fsync(descriptor)
os.fchmod(descriptor, 0o600)
os.utime(descriptor, ns=(OLDER, OLDER))
print("after fsync", seen("made", descriptor))
os.close(descriptor)
# Again, for a file that is not new any more.
descriptor = os.open("made", os.O_WRONLY)
os.fchmod(descriptor, 0o664)
os.utime(descriptor, ns=(OLD, OLDER))
print("opened again", seen("made", descriptor))
os.close(descriptor)
# Only one of the two times is set.
descriptor = os.open("half", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
os.write(descriptor, b"x")
os.utime(descriptor, ns=(OLD, OLD))
os.close(descriptor)
subprocess.run(["touch", "-a", "-d", "@5", "half"], check=True)
descriptor = os.open("half", os.O_WRONLY)
os.write(descriptor, b"y")
os.utime(descriptor, ns=(OLDER, OLDER))
subprocess.run(["touch", "-a", "-d", "@5", "half"], check=True)
print("half", seen("half", descriptor))
os.write(descriptor, b"z")
subprocess.run(["touch", "-a", "-d", "@6", "half"], check=True)
print("written just now:", os.stat("half").st_mtime > 1_500_000_000, os.stat("half").st_atime)
os.close(descriptor)
P
