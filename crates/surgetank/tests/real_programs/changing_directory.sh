# Leaving and entering the directory in every way: absolute, relative, through links and through /proc.
here=$PWD
mkdir -p sub/deeper
cd /
echo one >"$here/sub/absolute"
cd "$here/sub"
cd deeper
echo two >../relative
cd ../..
[ "$PWD" = "$here" ] && echo home
ln -s "$here/sub" absolute-link
ln -s sub/../sub/./deeper relative-link
cd absolute-link
echo three >through-link
cd -P .
[ "$PWD" = "$here/sub" ] && echo resolved
cd "$here"
echo four >relative-link/file
echo five >"$here//sub/./deeper/../odd"
echo six >"/proc/self/cwd/sub/by-proc"
exec 5<sub
echo seven >/proc/self/fd/5/by-descriptor
exec 5<&-
cat sub/absolute sub/relative sub/through-link sub/deeper/file sub/odd sub/by-proc sub/by-descriptor
realpath -e absolute-link --relative-to="$here"
"$PYTHON" - <<'P'
import os
inside = os.open("sub", os.O_RDONLY | os.O_DIRECTORY)
os.chdir("/")
os.fchdir(inside)
open("after-fchdir", "w").write("eight\n")
os.chdir("..")
print(sorted(os.listdir(".")))
print(os.readlink(f"/proc/self/fd/{inside}").endswith("/sub"))
P
rm absolute-link # it names this very directory
mkdir gone
cd gone
rmdir ../gone
(echo x >file) 2>/dev/null || echo refused
cd "$here"
find . | sort
