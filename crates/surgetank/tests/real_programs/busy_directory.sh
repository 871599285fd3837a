# A directory of 5,000 names, listed while names come and go: each name that stays is listed exactly once.
"$PYTHON" - <<'P'
import os, threading
os.mkdir("many")
for n in range(5000):
    open(f"many/stays-{n:05}", "w").close()
stop = threading.Event()
def churn():
    n = 0
    while not stop.is_set():
        open(f"many/passes-{n}", "w").close()
        os.rename(f"many/passes-{n}", f"many/renamed-{n}")
        os.unlink(f"many/renamed-{n}")
        n += 1
thread = threading.Thread(target=churn)
thread.start()
missed = doubled = 0
for _ in range(10):
    names = [name for name in os.listdir("many") if name.startswith("stays-")]
    missed += 5000 - len(set(names))
    doubled += len(names) - len(set(names))
stop.set()
thread.join()
print("missed", missed, "doubled", doubled)
# Removing while listing is what `rm -r` does.
with os.scandir("many") as entries:
    for entry in entries:
        if int(entry.name.split("-")[1]) % 2:
            os.unlink(entry.path)
print(len(os.listdir("many")))
P
ls many | sort | sed -n '1p;$p'
rm -r many
mkdir many
(cd many && seq -f 'n%g' 300 | xargs touch)
ls many | wc -l
