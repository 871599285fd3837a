# Redirections, here-documents, pipes and appends by several writers at once.
cat >here <<'T'
one $PWD
two
T
cat <here >copy 2>errors
{ echo a; echo b >&2; } >out 2>err
{ echo c; echo d >&2; } >>out 2>>err
cat out err
for n in 1 2 3 4; do (for m in $(seq 100); do echo "writer $n line $m"; done >>together) & done
wait
sort together | uniq | wc -l
for n in 1 2 3 4; do (for m in $(seq 100); do printf '%s\n' "$n$n$n$n$n$n$n$n"; done >>whole) & done
wait
sort -o whole whole
sort -o together together
uniq -c whole | awk '{print $1, $2}'
yes | head -n 100000 | tee big | md5sum
exec 3<>both
echo written >&3
cat both
exec 3>&-
set -o noclobber
(echo x >both) 2>/dev/null || echo refused
