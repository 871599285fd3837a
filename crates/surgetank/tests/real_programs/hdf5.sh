# HDF5 as simulations and analyses use it: chunks, compression, growth, links between files, a reader during the writes.
# needs: h5dump h5repack h5diff h5ls
# python: h5py numpy
"$PYTHON" - <<'P'
import h5py, numpy as np
with h5py.File("run.h5", "w") as file:
    field = file.create_dataset("fields/density", (0, 200, 100), maxshape=(None, 200, 100), chunks=(1, 100, 100),
                                compression="gzip", shuffle=True, dtype="f4")
    for step in range(20):
        field.resize(step + 1, axis=0)
        field[step] = np.arange(20_000).reshape(200, 100) * step
    file["fields/density"].attrs["unit"] = "kg/m3"
    file.create_dataset("names", data=["alpha", "beta", "gamma"], dtype=h5py.string_dtype())
    file.create_dataset("table", data=np.array([(1, 2.5), (3, 4.5)], dtype=[("id", "i4"), ("value", "f8")]))
    file["alias"] = h5py.SoftLink("/fields/density")
    file.flush()
# Opened again, changed in the middle, grown.
with h5py.File("run.h5", "r+") as file:
    file["fields/density"][10:12, 50:60] = -1
    file["fields/density"].resize(25, axis=0)
    file["fields/density"][24] = 7
    del file["names"]
    file.attrs["finished"] = True
with h5py.File("run.h5", "a") as file:
    file.require_group("later").create_dataset("ones", data=np.ones(1000), track_times=False)
with h5py.File("all.h5", "w") as file:
    file["run"] = h5py.ExternalLink("run.h5", "/fields")
    layout = h5py.VirtualLayout(shape=(2, 200, 100), dtype="f4")
    layout[0] = h5py.VirtualSource("run.h5", "fields/density", shape=(25, 200, 100))[3]
    layout[1] = h5py.VirtualSource("run.h5", "fields/density", shape=(25, 200, 100))[24]
    with h5py.File("chosen.h5", "w") as chosen:
        chosen.create_virtual_dataset("chosen", layout)
    # Contents that are stored in a plain file of their own.
    file.create_dataset("outside", (5000,), dtype="i4", track_times=False, external=[("outside.raw", 0, 20_000)])
    file["outside"][:] = np.arange(5000)
P
# Read by another process, through both kinds of links.
"$PYTHON" - <<'P'
import h5py, numpy as np
with h5py.File("all.h5", "r") as file:
    print(float(file["run/density"][:].sum(dtype="f8")), file["run/density"].shape, file["run/density"].attrs["unit"])
    chosen = h5py.File("chosen.h5", "r")["chosen"]
    print(float(chosen[:].sum(dtype="f8")), int(file["outside"][:].sum()))
    print(np.fromfile("outside.raw", dtype="i4")[-3:])
with h5py.File("run.h5", "r") as file:
    names = []
    file.visit(names.append)
    print(names, list(file), file["alias"].shape, file["table"]["value"], bool(file.attrs["finished"]))
with h5py.File("in-memory.h5", "w", driver="core", backing_store=True) as file:
    file["x"] = np.arange(100_000)
with h5py.File("parts-%d.h5", "w", driver="family", memb_size=100_000) as file:
    file["x"] = np.arange(100_000)
with h5py.File("parts-%d.h5", "r", driver="family", memb_size=100_000) as file:
    print(int(file["x"][:].sum()))
P
# A writer locks the file against other processes.
cat >"$HOME/busy.py" <<'P'
import h5py
try:
    h5py.File("run.h5", "r")
    print("opened")
except OSError as why:
    print("refused:", "unable to lock file" in str(why))
P
"$PYTHON" - <<'P'
import h5py, os, subprocess, sys
look = [sys.executable, os.path.expanduser("~/busy.py")]
with h5py.File("run.h5", "r+"):
    subprocess.run(look)
subprocess.run(look)
P
# One writer, and a reader that reads the file while it grows.
"$PYTHON" - <<'P'
import h5py, numpy as np, os, sys
to_reader, to_writer = os.pipe(), os.pipe()
if os.fork() == 0:
    os.read(to_reader[0], 1)
    with h5py.File("swmr.h5", "r", libver="latest", swmr=True) as file:
        grows, seen = file["grows"], []
        for _ in range(5):
            os.write(to_writer[1], b"x")
            os.read(to_reader[0], 1)
            grows.refresh()
            seen.append((len(grows), int(grows[:].sum())))
        print(seen, flush=True)
    os._exit(0)
with h5py.File("swmr.h5", "w", libver="latest") as file:
    grows = file.create_dataset("grows", (0,), maxshape=(None,), chunks=(1000,), dtype="i8")
    file.swmr_mode = True
    os.write(to_reader[1], b"x")
    for step in range(5):
        os.read(to_writer[0], 1)
        grows.resize(((step + 1) * 3000,))
        grows[step * 3000 :] = step
        grows.flush()
        os.write(to_reader[1], b"x")
    print(os.wait()[1])
P
h5dump -d /table run.h5
h5repack -f GZIP=9 run.h5 packed.h5
h5diff run.h5 packed.h5 && echo same
h5ls -r all.h5
ls
# These files contain the time of their creation.
rm packed.h5 chosen.h5
