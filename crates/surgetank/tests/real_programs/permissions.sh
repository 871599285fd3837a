# Modes, umask, set-group-id directories, owners and attributes.
# needs: setfattr getfattr chmod
umask 027
echo x >by-umask
mkdir by-umask-directory
stat -c '%n %a' by-umask by-umask-directory
for mode in 000 400 755 4755 2755 1777 666; do echo x >mode$mode; chmod $mode mode$mode; stat -c '%n %a' mode$mode; done
mkdir -m 2775 shared
mkdir shared/child
stat -c '%a' shared/child
echo changed >>mode4755
stat -c '%a' mode4755
if [ "$(id -u)" = 0 ]; then chown 12:34 mode755 && chown -h 5:6 by-umask; fi
ln -s mode666 pointer
stat -c '%A' pointer
setfattr -n user.text -v 'some words' mode666
setfattr -n user.binary -v 0x00ff10 mode666
setfattr -n user.directory -v d shared
getfattr -d -e hex mode666 shared
setfattr -x user.text mode666
getfattr -d mode666
getfattr -n user.none mode666 2>&1 | sed 's/.*: //'
setfattr -n user.large -v "$(head -c 2000 /dev/zero | tr '\0' v)" mode666
getfattr --only-values -n user.large mode666 | wc -c
touch -d '2020-02-02 02:02:02.020202020 UTC' mode666 shared
touch -h -d '2019-01-01 UTC' pointer
cp -a mode666 copied
stat -c '%n %y' copied shared pointer
