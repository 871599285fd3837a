# Reads and writes without the page cache, mixed with ordinary ones.
# needs: dd cmp
seq 400000 | head -c 2097152 >reference
dd if=reference of=direct bs=64K oflag=direct status=none
cmp reference direct
dd if=direct of=back bs=4K iflag=direct status=none
cmp reference back
dd if=/dev/zero of=direct bs=4096 seek=3 count=2 oflag=direct conv=notrunc status=none
cmp reference direct | head -n 1
od -A d -c -j 12288 -N 16 direct
echo tail >>direct
dd if=reference of=synced bs=1M oflag=sync status=none
dd if=reference of=flushed bs=1M conv=fsync status=none
cmp synced flushed
stat -c '%n %s' direct back synced
