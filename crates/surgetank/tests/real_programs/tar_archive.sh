# Archives with links, sparse files and extended attributes, in and out.
# needs: tar setfattr getfattr gzip
mkdir -p source/deep
seq 50000 >source/numbers
ln source/numbers source/deep/linked
ln -s ../numbers source/deep/pointer
truncate -s 4M source/sparse
printf end | dd of=source/sparse bs=1 seek=3000000 conv=notrunc status=none
setfattr -n user.origin -v 'station 7' source/numbers
mkfifo source/pipe
chmod 2750 source/deep
find source -depth -exec touch -h -d '2005-05-05 05:05:05.5 UTC' {} +
tar --sort=name --xattrs --sparse --format=posix --pax-option=exthdr.name=%d/PaxHeaders/%f,delete=atime,delete=ctime -cf archive.tar source
mkdir out
tar -C out --xattrs -xpf archive.tar
diff -r --no-dereference source/deep out/source/deep
cmp source/sparse out/source/sparse
getfattr --only-values -n user.origin out/source/numbers
echo
stat -c '%n %a %s %h %y' out/source/numbers out/source/deep out/source/sparse
[ $(($(stat -c %b out/source/sparse) * 512)) -lt 2000000 ] && echo still sparse
tar --sort=name -C out -czf - source --mtime=@0 | tar -tzf - | sort
# Sparse members have tar's process number in their names, so only an ordinary archive can be compared.
rm archive.tar
tar --sort=name --format=gnu -cf archive.tar source
