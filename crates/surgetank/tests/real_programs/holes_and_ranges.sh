# Operations on ranges of a file: preallocation, holes, copies inside the kernel.
# needs: fallocate
"$PYTHON" - <<'P'
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
KEEP, PUNCH, ZERO, MIB = 1, 2, 16, 1 << 20

with open("ranges", "w+b") as file:
    descriptor = file.fileno()
    os.posix_fallocate(descriptor, 0, 4 * MIB)
    print(os.fstat(descriptor).st_size, os.fstat(descriptor).st_blocks * 512 >= 4 * MIB)
    for n in range(4):
        os.pwrite(descriptor, bytes([65 + n]) * MIB, n * MIB)
    print("punch:", libc.fallocate(descriptor, PUNCH | KEEP, MIB, 2 * MIB))
    print(os.pread(descriptor, 1, 0), os.pread(descriptor, 1, 2 * MIB), os.pread(descriptor, 1, 3 * MIB))
    print("beyond the end:", libc.fallocate(descriptor, KEEP, 0, 8 * MIB), os.fstat(descriptor).st_size)

with open("sparse", "w+b") as file:
    descriptor = file.fileno()
    os.ftruncate(descriptor, 16 * MIB)
    os.pwrite(descriptor, b"island" * 1000, 8 * MIB)
    data = os.lseek(descriptor, 0, os.SEEK_DATA)
    hole = os.lseek(descriptor, data, os.SEEK_HOLE)
    print("data found:", MIB < data <= 8 * MIB, "and its end:", 8 * MIB + 6000 <= hole < 16 * MIB)
    print("first hole:", os.lseek(descriptor, 0, os.SEEK_HOLE))
    try:
        os.lseek(descriptor, 12 * MIB, os.SEEK_DATA)
    except OSError as error:
        print("no data after:", error.errno)
    print("takes little:", os.fstat(descriptor).st_blocks * 512 < 2 * MIB)

with open("sparse", "rb") as source, open("copied", "w+b") as target:
    left = 16 * MIB
    while left > 0:
        got = os.copy_file_range(source.fileno(), target.fileno(), left)
        if got == 0:
            break
        left -= got
    print("copied, left:", left)
with open("copied", "r+b") as file:
    print(os.copy_file_range(file.fileno(), file.fileno(), 6000, 8 * MIB, 0), os.pread(file.fileno(), 6, 0))
with open("ranges", "rb") as source, open("sent", "wb") as target:
    sent = 0
    while sent < 4 * MIB:
        sent += os.sendfile(target.fileno(), source.fileno(), sent, 4 * MIB - sent)
    print("sent:", sent)
P
fallocate -l 100000 preallocated
stat -c %s preallocated
cmp copied sparse | head -n 1
cmp sent ranges && echo same
