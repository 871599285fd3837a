# needs: bwrap python3
# Tasks in containers, as Apptainer and bubblewrap make them: another root, the directory bound into it, other processes invisible.
mkdir in out
seq 1000 > in/numbers
contained() { bwrap --ro-bind / / --dev /dev --proc /proc --unshare-pid --unshare-ipc --die-with-parent "$@"; }

echo "== bound where it is"
contained --bind "$PWD" "$PWD" --chdir "$PWD" sh -c 'sort -rn in/numbers > out/sorted && wc -l < out/sorted && head -n 1 out/sorted'
tail -n 1 out/sorted

echo "== bound somewhere else, with an empty environment"
contained --tmpfs /tmp --bind "$PWD" /tmp/data --chdir /tmp/data --clearenv --setenv PATH "$PATH" sh -c '
    mkdir sub && cp in/numbers sub/part && mv sub/part sub/whole && ln sub/whole sub/same && rm sub/same
    cat /tmp/data/sub/whole | tail -n 1; ls sub'
cmp in/numbers sub/whole && echo same

echo "== a part of it, and only for reading"
contained --tmpfs /tmp --ro-bind "$PWD/in" /tmp/in --bind "$PWD/out" /tmp/out --chdir /tmp sh -c '
    wc -l < in/numbers; (echo x > in/new) 2>/dev/null || echo refused; awk "{ s += \$1 } END { print s }" in/numbers > out/sum'
cat out/sum

echo "== inside writes, outside reads, and the other way"
mkfifo go
contained --bind "$PWD" "$PWD" --chdir "$PWD" sh -c 'echo one > note; echo written > go; read -r word < go; cat note; echo "$word"' > said &
read -r word < go
echo "$word"; cat note
echo two >> note; echo answered > go
wait
cat said
rm go

echo "== as a user who is root only there"
contained --unshare-user --uid 0 --gid 0 --bind "$PWD" "$PWD" --chdir "$PWD" sh -c 'id -u; echo mine > by_root; stat -c %u by_root'
stat -c %u by_root | sed "s/^$(id -u)\$/ours/"
