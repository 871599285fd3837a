"""Does all kinds of operations until the file STOP exists, and checks each against the result in a plain directory.

The first difference ends it with an error. usage: continues.py NAME STOP"""
import errno
import os
import random
import sys

name, stop = sys.argv[1:]
dice = random.Random(name)
os.mkdir(name)
os.chdir(name)
held = os.open("held", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
reading = os.open("held", os.O_RDONLY)
appended, files, rounds = b"", {}, 0


def check(is_so, what):
    if not is_so:
        sys.exit(f"{name}, round {rounds}: {what}")


def refused(code, act, *words):
    try:
        act(*words)
    except OSError as why:
        check(why.errno == code, f"{act.__name__} {words}: {why}")
    else:
        check(False, f"{act.__name__} {words}: not refused")


def write(path, data, flags=os.O_WRONLY | os.O_CREAT | os.O_EXCL):
    file = os.open(path, flags, 0o640)
    for at in range(0, len(data), 5000):
        check(os.write(file, data[at : at + 5000]) == len(data[at : at + 5000]), "a short write")
    check(os.fstat(file).st_size == len(data), f"{path}: {os.fstat(file).st_size} instead of {len(data)}")
    os.close(file)


def read(path):
    with open(path, "rb") as file:
        return file.read()


while rounds < 4 or not os.path.exists(stop):
    rounds += 1
    data = dice.randbytes(dice.randrange(20000))
    line = b"%d\n" % rounds
    os.write(held, line)
    appended += line
    at = dice.randrange(len(appended))
    check(os.pread(reading, 1000, at) == appended[at : at + 1000], "the appended data")
    path = f"f{rounds}"
    write(path, data)
    files[path] = data
    check(read(path) == data, f"{path} reads otherwise")
    refused(errno.EEXIST, os.open, path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    refused(errno.EEXIST, os.mkdir, path)
    os.mkdir(f"d{rounds}")
    os.rename(path, f"d{rounds}/moved")
    refused(errno.ENOENT, os.stat, path)
    refused(errno.ENOTEMPTY, os.rmdir, f"d{rounds}")
    os.link(f"d{rounds}/moved", "link")
    check(os.stat("link").st_nlink == 2 and os.stat("link").st_ino == os.stat(f"d{rounds}/moved").st_ino, "the link")
    os.symlink(f"d{rounds}", "way")
    check(os.readlink("way") == f"d{rounds}" and read("way/moved") == data, "the symbolic link")
    os.unlink("way")
    os.unlink("link")
    check(os.stat(f"d{rounds}/moved").st_nlink == 1, "links")
    os.rename(f"d{rounds}/moved", path)
    os.rmdir(f"d{rounds}")
    refused(errno.ENOENT, os.rmdir, f"d{rounds}")
    # Open without a name: a read returns the written data.
    gone = os.open("gone", os.O_RDWR | os.O_CREAT)
    os.write(gone, data)
    os.unlink("gone")
    refused(errno.ENOENT, os.stat, "gone")
    os.pwrite(gone, b"end", len(data))
    check(os.pread(gone, len(data) + 10, 0) == data + b"end", "a file without a name")
    os.close(gone)
    # One file over the other.
    if len(files) > 20:
        old = dice.choice([one for one in files if one != path])
        os.rename(path, old)
        files[old] = files.pop(path)
        os.truncate(old, len(data) // 2)
        files[old] = data[: len(data) // 2]
        check(os.stat(old).st_size == len(data) // 2, "truncated")
        last = dice.choice(list(files))
        del files[last]
        os.unlink(last)
    listed = sorted(os.listdir("."))
    check(listed == sorted([*files, "held"]), f"listed: {set(listed) ^ {*files, 'held'}}")
    some = dice.choice(list(files))
    os.chmod(some, 0o600 + rounds % 8)
    os.utime(some, ns=(rounds, rounds))
    seen = os.stat(some)
    check((seen.st_mode & 0o777, seen.st_mtime_ns) == (0o600 + rounds % 8, rounds), "attributes")
    check(read(some) == files[some], f"{some} reads otherwise")
os.lseek(reading, 0, 0)
check(read("held") == appended, "all appended data")
os.close(held)
# The expected content of the store at the end.
import hashlib

with open(f"/mnt/aside/{name}", "w") as account:
    for path, data in [*files.items(), ("held", appended)]:
        account.write(f"{hashlib.sha256(data).hexdigest()}  {name}/{path}\n")
print(name, "made", rounds, "rounds")
