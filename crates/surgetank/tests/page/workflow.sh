#!/usr/bin/env bash
# A workflow for the pictures of a report: programs that make files in parallel and in sequence, more than a tier of 80 MiB holds.
# Run it in an empty directory.
set -e
mkdir raw out
for i in 1 2 3 4 5 6; do
    (head -c 9M /dev/urandom >raw/chunk-$i.bin && gzip -1 -k raw/chunk-$i.bin) &
done
wait
for i in 1 2 3 4 5 6; do
    /usr/bin/python3 - $i <<'PYTHON' &
import hashlib, sys, time
content = open(f"raw/chunk-{sys.argv[1]}.bin", "rb").read()
until = time.monotonic() + 0.5
while time.monotonic() < until:
    digest = hashlib.sha256(content).digest()
open(f"out/result-{sys.argv[1]}.dat", "wb").write(content[:3_000_000] + digest)
PYTHON
done
wait
cat out/*.dat >out/merged
tar cf out/all.tar raw/*.gz
rm raw/chunk-2.bin
/usr/bin/python3 - <<'PYTHON'
for number in range(300):
    with open(f"out/small-{number}.txt", "w") as file:
        file.write("x" * number * 10)
PYTHON
