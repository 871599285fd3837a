"""Changes a directory step by step, the same way for the same seed, and records each step at its start and its end.

changes.py SEED STEPS DIRECTORY LOG: each step is one line in LOG when it begins and one when it is done.
Every file says in each of its lines which version it is, how many lines there are, and which this one is.
"""
import os
import random
import sys

seed, steps, root, log = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
chance = random.Random(seed)
log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
os.makedirs(root, exist_ok=True)
os.chdir(root)
files, dirs, version = [], ["."], 0


def content(lines):
    global version
    version += 1
    return b"".join(b"%08d %08d %08d\n" % (version, lines, at) for at in range(lines))


def inside(path, directory):
    return path.startswith(directory + "/")


def moved(path, old, new):
    return new + path[len(old):] if inside(path, old) else path


def write(path, lines):
    data = content(lines)
    with open(path, "wb", buffering=0) as file:
        for at in range(0, len(data), 100_000):
            file.write(data[at:at + 100_000])


def step(number):
    """Chooses a step: its kind, the paths that it touches, and its function."""
    global files, dirs
    kind = chance.choices(
        ["write", "again", "rename", "over", "renamedir", "unlink", "mkdir", "symlink", "chmod", "replace"],
        [40, 8, 10, 8, 6, 8, 8, 2, 4, 6])[0]
    plain = [path for path in files if not path.rsplit("/", 1)[-1].startswith("link")]
    if not plain and kind != "mkdir":
        kind = "write"
    lines = chance.choice([1, 3, 40, 4000, 40_000])
    fresh = os.path.join(chance.choice(dirs), f"{number}")
    if kind == "write":
        files.append(fresh)
        return kind, [fresh], lambda: write(fresh, lines)
    if kind == "again":
        path = chance.choice(plain)
        return kind, [path], lambda: write(path, lines)
    if kind == "replace":
        # Like careful programs: a complete file replaces another one.
        path = chance.choice(plain)

        def replace():
            write(path + ".new", lines)
            os.rename(path + ".new", path)
        return kind, [path, path + ".new"], replace
    if kind == "rename":
        path = chance.choice(plain)
        files.remove(path)
        files.append(fresh)
        return kind, [path, fresh], lambda: os.rename(path, fresh)
    if kind == "over" and len(plain) > 1:
        path, target = chance.sample(plain, 2)
        files.remove(path)
        return kind, [path, target], lambda: os.rename(path, target)
    if kind == "renamedir" and len(dirs) > 1:
        old = chance.choice(dirs[1:])
        new = os.path.join(chance.choice([d for d in dirs if d != old and not inside(d, old)]), f"dir{number}")
        files = [moved(path, old, new) for path in files]
        dirs = [new if path == old else moved(path, old, new) for path in dirs]
        return kind, [old, new], lambda: os.rename(old, new)
    if kind == "unlink":
        path = chance.choice(plain)
        files.remove(path)
        return kind, [path], lambda: os.unlink(path)
    if kind == "symlink":
        path = os.path.join(chance.choice(dirs), f"link{number}")
        return kind, [path], lambda: os.symlink(f"to {number}", path)
    if kind == "chmod":
        path = chance.choice(plain)
        mode = chance.choice([0o600, 0o640, 0o755])
        return kind, [path], lambda: os.chmod(path, mode)
    path = os.path.join(chance.choice(dirs), f"dir{number}")
    dirs.append(path)
    return "mkdir", [path], lambda: os.mkdir(path)


for number in range(steps):
    kind, paths, act = step(number)
    os.write(log, f"begin {kind} {' '.join(os.path.normpath(path) for path in paths)}\n".encode())
    act()
    os.write(log, f"done {number}\n".encode())
