# One file, one identity: device and inode agree between names, descriptors and directory listings.
# needs: find
mkdir -p a/b
echo 1 >a/one
ln a/one a/b/same
echo 2 >a/two
find . -samefile a/one | sort
find . -xdev -type f -links 2 | sort
find . -xdev -type d | sort
touch -d '2010-01-01 UTC' a/two
find . -newer a/two -type f | sort
find . -empty | sort
[ a/one -ef a/b/same ] && echo one file
[ a/one -ef a/two ] || echo two files
"$PYTHON" - <<'P'
import os
listed = {entry.name: entry.inode() for entry in os.scandir("a")}
with open("a/one") as one:
    by_descriptor = os.fstat(one.fileno())
by_name = os.stat("a/one")
print("listing, name and descriptor agree:", listed["one"] == by_name.st_ino == by_descriptor.st_ino)
print("one device:", by_name.st_dev == by_descriptor.st_dev == os.stat("a").st_dev == os.stat(".").st_dev)
before = by_name.st_ino
os.rename("a/one", "a/renamed")
print("rename keeps the number:", os.stat("a/renamed").st_ino == before)
with open("a/renamed", "a") as more:
    more.write("more\n")
print("writing keeps the number:", os.stat("a/b/same").st_ino == before)
P
