# A reader follows a log while another program writes it.
# needs: tail
: >log
(for n in $(seq 200); do echo "step $n" >>log; [ $((n % 50)) != 0 ] || sleep 0.1; done) &
writer=$!
tail -n +1 -s 0.05 -f --pid=$writer log >followed
wait $writer
cmp log followed
wc -l <followed
