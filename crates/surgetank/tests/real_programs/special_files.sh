# Pipes and sockets in a project directory: both transfer data.
mkfifo pipe
(echo through the pipe >pipe) &
cat pipe
wait
"$PYTHON" - <<'P'
import os, socket, stat
server = socket.socket(socket.AF_UNIX)
server.bind("socket")
server.listen()
if os.fork() == 0:
    client = socket.socket(socket.AF_UNIX)
    client.connect("socket")
    client.sendall(b"through the socket")
    os._exit(0)
connection, _ = server.accept()
print(connection.recv(100))
os.wait()
print(stat.S_ISSOCK(os.stat("socket").st_mode), stat.S_ISFIFO(os.stat("pipe").st_mode))
P
rm socket
