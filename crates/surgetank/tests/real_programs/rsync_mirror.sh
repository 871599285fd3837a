# Mirrors with hard links, permissions, times and attributes; then only the changed files.
# needs: rsync setfattr getfattr
mkdir -p from/deep
for n in $(seq 30); do seq $((n * 50)) >from/deep/file$n; done
ln from/deep/file1 from/linked
ln -s deep/file2 from/pointer
setfattr -n user.kept -v yes from/deep/file3
chmod 604 from/deep/file4
find from -exec touch -h -d '2011-11-11 11:11:11 UTC' {} +
rsync -aHX from/ to/
rsync -aHXni from/ to/
getfattr --only-values -n user.kept to/deep/file3
echo
stat -c '%n %a %h %y' to/deep/file4 to/linked to/deep
echo changed >>from/deep/file5
touch -d '2012-12-12 12:12:12 UTC' from/deep/file5
rm from/deep/file6
rsync -aHXi --delete --inplace from/ to/ | grep -v '/$'
rsync -aHXni from/ to/ | grep -v '/$' || echo in step
diff -r from to && echo equal
