# The same with a write-ahead log, whose index is a shared memory map of a file in the directory.
# needs: sqlite3
sqlite3 data.db "PRAGMA journal_mode=wal; CREATE TABLE pair(a INTEGER, b INTEGER);"
read_all() {
    while [ ! -e done ]; do
        sqlite3 -cmd '.timeout 20000' data.db 'SELECT count(*) FROM pair WHERE a != b' >>"$1"
    done
}
read_all odd1 & first=$!
read_all odd2 & second=$!
for n in $(seq 40); do
    sqlite3 -cmd '.timeout 20000' data.db "BEGIN IMMEDIATE; INSERT INTO pair VALUES($n, $n - 1); UPDATE pair SET b = a WHERE a = $n; COMMIT;"
done
touch done
wait $first $second
cat odd1 odd2 | sort -u
rm odd1 odd2
"$PYTHON" - <<'P'
import sqlite3
writer, reader = sqlite3.connect("data.db", isolation_level=None), sqlite3.connect("data.db", isolation_level=None)
reader.execute("BEGIN")
before = reader.execute("SELECT count(*) FROM pair").fetchone()[0]
writer.execute("INSERT INTO pair VALUES(41, 41)")
print("a snapshot stays:", before, reader.execute("SELECT count(*) FROM pair").fetchone()[0])
reader.execute("COMMIT")
print("and moves on:", reader.execute("SELECT count(*) FROM pair").fetchone()[0])
P
sqlite3 data.db "PRAGMA wal_checkpoint(TRUNCATE); PRAGMA integrity_check; SELECT count(*), sum(a), sum(b) FROM pair; VACUUM INTO 'copy.db'"
# The readers decide when the log is copied back, so the database's own bytes vary.
rm -f data.db*
ls
