# Locks of both kinds, across processes: only one process holds an exclusive lock at a time.
# needs: flock
for n in 1 2 3 4; do
    (for _ in $(seq 25); do
        flock counter.lock sh -c 'value=$(cat counter 2>/dev/null || echo 0); echo $((value + 1)) >counter'
    done) &
done
wait
cat counter
exec 9>held.lock
flock -x 9
flock -n held.lock echo not reached || echo "busy: $?"
flock -u 9
flock -n held.lock echo free
"$PYTHON" - <<'P'
import fcntl, os, struct
with open("ranges", "w+b") as file:
    file.write(bytes(1000))
    file.flush()
    fcntl.lockf(file, fcntl.LOCK_EX, 100, 0)
    fcntl.lockf(file, fcntl.LOCK_SH, 100, 500)
    read, write = os.pipe()
    if os.fork() == 0:
        other = open("ranges", "r+b")
        words = []
        for kind, length, start in ((fcntl.LOCK_EX, 10, 50), (fcntl.LOCK_EX, 10, 200), (fcntl.LOCK_SH, 10, 550), (fcntl.LOCK_EX, 10, 550)):
            try:
                fcntl.lockf(other, kind | fcntl.LOCK_NB, length, start)
                words.append("granted")
            except OSError:
                words.append("busy")
        asked = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 10, 0)
        holder = struct.unpack("hhqqi4x", fcntl.fcntl(other, fcntl.F_GETLK, asked))
        # On the plain file the kernel reports process -1 for a lock that was taken through the mount.
        words.append("held by my parent" if holder[4] in (os.getppid(), -1) else "held by another process")
        os.write(write, " ".join(words).encode())
        os._exit(0)
    os.wait()
    print(os.read(read, 200).decode())
with open("ranges", "r+b") as first, open("ranges", "r+b") as second:
    fcntl.flock(first, fcntl.LOCK_EX)
    try:
        fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        print("granted")
    except OSError:
        print("busy")
P
