//! A server in this process that acknowledges every command at once: the time of a request is the client's own time.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};

/// Returns its port.
pub fn start() -> std::io::Result<u16> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let port = listener.local_addr()?.port();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            std::thread::spawn(move || serve(stream));
        }
    });
    Ok(port)
}

fn serve(mut stream: TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let (mut asked, agreement) = (Vec::new(), agreement());
    loop {
        let mut head = [0; 16];
        stream.read_exact(&mut head)?;
        let number = |at: usize| i32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        asked.resize(usize::try_from(number(0) - 16).map_err(std::io::Error::other)?, 0);
        stream.read_exact(&mut asked)?;
        let mut answer = Vec::new();
        // OP_MSG, without flags, with one document.
        for field in [21 + agreement.len() as i32, 1, number(4), 2013, 0] {
            answer.extend_from_slice(&field.to_le_bytes());
        }
        answer.push(0);
        answer.extend_from_slice(&agreement);
        stream.write_all(&answer)?;
    }
}

/// One document for every command: the server is the primary, one document was changed, none was found.
fn agreement() -> Vec<u8> {
    let document = |body: Vec<u8>| {
        let length = (body.len() + 5) as i32;
        [&length.to_le_bytes()[..], &body, b"\0"].concat()
    };
    let int = |name: &str, value: i32| [b"\x10", name.as_bytes(), b"\0", &value.to_le_bytes()].concat();
    let long = |name: &str, value: i64| [b"\x12", name.as_bytes(), b"\0", &value.to_le_bytes()].concat();
    let cursor =
        [long("id", 0), b"\x02ns\0\x0b\0\0\0db.b.files\0".to_vec(), b"\x04firstBatch\0".to_vec(), document(Vec::new())];
    let fields = [
        int("ok", 1),
        int("n", 1),
        b"\x08isWritablePrimary\0\x01".to_vec(),
        b"\x08helloOk\0\x01".to_vec(),
        int("minWireVersion", 0),
        int("maxWireVersion", 21),
        int("maxBsonObjectSize", 16 << 20),
        int("maxMessageSizeBytes", 48_000_000),
        int("maxWriteBatchSize", 100_000),
        b"\x03cursor\0".to_vec(),
        document(cursor.concat()),
    ];
    document(fields.concat())
}
