# Files in the store from before the run: read, appended to, rewritten, renamed over, removed, linked.
# needs: bash sed
#: before
mkdir -p old/deep/er
for n in 1 2 3 4 5 6 7 8 9; do echo "line of $n" >old/file$n; done
head -c 300000 /dev/zero | tr '\0' z >old/big
ln old/file8 old/deep/linked
ln -s ../file1 old/deep/pointer
chmod 600 old/file9
touch -d '1999-12-31 23:59:59 UTC' old/* old/deep/er
#: run
ls -R old
cat old/deep/pointer
stat -c '%n %s %a %y' old/file9 old/file5
echo appended >>old/file1
cat old/deep/pointer
echo new >old/file2
sed -i s/line/LINE/ old/file3
mv old/file4 old/file5
rm old/file6
mv old/file7 old/deep/er/file7
echo through-one-name >>old/deep/linked
cat old/file8
chmod 644 old/file9
printf 'abc' | dd of=old/big bs=1 seek=150000 conv=notrunc status=none
mv old/deep moved-deep
: >old/file1
(umask 077; cp -a moved-deep again)
rm -r moved-deep
ls -R .
