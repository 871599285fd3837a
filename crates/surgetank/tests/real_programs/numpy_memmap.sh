# An array larger than one read, mapped, changed in place, mapped again by another process.
# python: numpy
"$PYTHON" - <<'P'
import numpy as np
field = np.lib.format.open_memmap("field.npy", mode="w+", dtype="f8", shape=(1000, 1000))
field[:] = np.arange(1_000_000).reshape(1000, 1000)
field[10:20, 30:40] *= -1
field.flush()
del field
raw = np.memmap("raw.bin", dtype="i4", mode="w+", shape=(500_000,))
raw[::7] = 7
P
"$PYTHON" - <<'P'
import numpy as np
field = np.load("field.npy", mmap_mode="r+")
print(field.sum(), field[15, 35], field.shape)
field[0] = 1
np.savez("both.npz", a=field[:2], b=np.memmap("raw.bin", dtype="i4", mode="r")[:100])
copy = np.memmap("raw.bin", dtype="i4", mode="c")
copy[:] = 9
print(np.memmap("raw.bin", dtype="i4", mode="r").sum(), sorted(np.load("both.npz").files))
P
# The members of numpy's archives have a fixed date.
ls
