# Names with newlines, of 255 bytes, that are not UTF-8, that look like options or patterns.
"$PYTHON" - <<'P'
import os
names = [b"new\nline", b"\xff\xfe not utf-8", b"-rf", b"*", b"?[a]{b}", b" ", b"trailing ", b"tab\there", b"back\\slash", b"quote'\"",
         "naïve-ünïcödé-日本".encode(), b"a" * 255, b"...", b".hidden", b"%s%n", b"$(touch x)", b"~", b"#", b"con:"]
for number, name in enumerate(names):
    with open(name, "wb") as file:
        file.write(b"%d" % number)
print(sorted(os.listdir(b".")) == sorted(names))
print(all(open(name, "rb").read() == b"%d" % number for number, name in enumerate(names)))
for name in (b"b" * 256, b"x/" * 2100 + b"y", b"with\0zero", b""):
    try:
        open(name, "wb")
    except (OSError, ValueError) as error:
        print(type(error).__name__, getattr(error, "errno", None))
deep = b"d" * 200
here = os.open(".", os.O_RDONLY)
for level in range(25):
    os.mkdir(deep)
    os.chdir(deep)
open(b"bottom", "wb").write(b"deeper than PATH_MAX")
os.fchdir(here)
for name in names[:8]:
    os.rename(name, name[:250] + b"-r")
os.symlink(b"new\nline-r", b"link\n")
print(os.readlink(b"link\n"), open(b"link\n", "rb").read())
print(len(os.listdir(b".")))
P
# Deeper than PATH_MAX: entered step by step, and removed by a program that supports such paths.
rm -r dddd*
ls -b
