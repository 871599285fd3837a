# Everyday file handling: copies that keep all attributes, moves, links, installs, splits and sorts in place.
# needs: cp mv ln install touch truncate dd split sort mktemp sha256sum
mkdir -p tree/sub
for n in 1 2 3; do seq $((n * 1000)) >tree/sub/file$n; done
ln -s sub/file1 tree/pointer
ln tree/sub/file2 tree/second-name
chmod 640 tree/sub/file3
touch -d '2001-02-03 04:05:06.123456789 UTC' tree/sub/file1 tree/sub/file3
cp -a tree copy
diff -r tree copy
stat -c '%n %s %a %h %y' copy/sub/file1 copy/sub/file3

mv copy/sub/file1 copy/moved
mv copy/sub renamed-directory
mv -n copy/moved renamed-directory/file2
mv -T renamed-directory elsewhere
install -D -m 755 tree/sub/file3 bin/deep/program
stat -c '%n %a' bin/deep/program

truncate -s 10000 short
truncate -s -9000 short
dd if=tree/sub/file1 of=short bs=100 seek=3 count=2 conv=notrunc status=none
dd if=tree/sub/file2 of=short bs=64 count=5 oflag=append conv=notrunc status=none
stat -c '%s' short

split -b 3000 -d tree/sub/file3 piece.
cat piece.* | cmp - tree/sub/file3
sort -rn -o tree/sub/file2 tree/sub/file2
head -n 2 tree/second-name

name=$(mktemp ./unique.XXXXXX)
stat -c '%a %s' "$name"
mv "$name" unique
directory=$(mktemp -d -p . scratch.XXXXXX)
echo kept >"$directory/file"
mv "$directory" scratch
cp --sparse=always short sparse-copy
cat tree/sub/* | tee both >second
cmp both second
rm -r elsewhere
sha256sum short unique scratch/file tree/sub/*
rm does-not-exist 2>&1 | sed 's/.*: //'
rmdir tree 2>&1 | sed 's/.*: //'
