# A database with a rollback journal, written while other processes read: no reader sees a partial transaction.
# needs: sqlite3
sqlite3 data.db "PRAGMA journal_mode=delete; CREATE TABLE pair(a INTEGER, b INTEGER);"
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
sqlite3 -cmd '.timeout 20000' data.db "BEGIN; DELETE FROM pair; ROLLBACK;"
touch done
wait $first $second
cat odd1 odd2 | sort -u
rm odd1 odd2
sqlite3 data.db 'PRAGMA integrity_check; SELECT count(*), sum(a), sum(b) FROM pair; PRAGMA journal_mode'
ls
