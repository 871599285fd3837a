//! A server for tests that does what good servers do not. It stands before a real server or instead of one, records every command,
//! and does what the script of the test says.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::bson::{Document, Value, fields};
use super::{GridFs, Place};

pub enum Does {
    /// Passes the command to the real server.
    Pass,
    Say(Document),
    /// Answers with these bytes.
    SayBytes(Vec<u8>),
    /// Ends the connection without executing the command.
    Cut,
    /// Executes the command and ends the connection without an answer.
    CutAfter,
    /// Sends an endless answer slowly, byte by byte.
    Trickle,
}

#[derive(Debug, Clone)]
pub struct Heard {
    pub name: String,
    /// Without the bucket.
    pub collection: String,
    pub body: Document,
}

impl Heard {
    pub fn is(&self, name: &str, collection: &str) -> bool {
        self.name == name && self.collection == collection
    }
}

type Script = Arc<Mutex<dyn FnMut(&Heard) -> Does + Send>>;

pub struct Scripted {
    port: u16,
    heard: Arc<Mutex<Vec<Heard>>>,
}

impl Scripted {
    /// `behind`: the port of the real server.
    pub fn new(behind: Option<u16>, script: impl FnMut(&Heard) -> Does + Send + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let script: Script = Arc::new(Mutex::new(script));
        let heard: Arc<Mutex<Vec<Heard>>> = Arc::default();
        let all = Arc::clone(&heard);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (script, all) = (Arc::clone(&script), Arc::clone(&all));
                std::thread::spawn(move || drop(serve(&mut stream.unwrap(), behind, &script, &all)));
            }
        });
        Self { port, heard }
    }

    pub fn place(&self) -> Place {
        let mut place = Place::parse(&format!("mongodb://127.0.0.1:{}/db?bucket=b", self.port)).unwrap();
        (place.limits.tries, place.limits.pause) = (3, Duration::from_millis(1));
        place
    }

    pub fn store(&self) -> GridFs {
        GridFs::new(self.place()).unwrap()
    }

    pub fn heard(&self, name: &str, collection: &str) -> Vec<Heard> {
        self.heard.lock().unwrap().iter().filter(|heard| heard.is(name, collection)).cloned().collect()
    }

    /// Names of the commands for a collection, in their order.
    pub fn order(&self, collection: &str) -> Vec<String> {
        let heard = self.heard.lock().unwrap();
        heard.iter().filter(|heard| heard.collection == collection).map(|heard| heard.name.clone()).collect()
    }
}

fn message(stream: &mut TcpStream) -> std::io::Result<Vec<u8>> {
    let mut head = [0; 4];
    stream.read_exact(&mut head)?;
    let mut whole = head.to_vec();
    whole.resize(i32::from_le_bytes(head) as usize, 0);
    stream.read_exact(&mut whole[4..])?;
    Ok(whole)
}

fn heard_in(message: &[u8]) -> Heard {
    // (A section of documents always comes behind the body.)
    let body = Document::read(&message[21..]).unwrap().0;
    let name = body.0[0].0.clone();
    let collection = body.text("collection").or_else(|| body.text(&name)).unwrap_or_default();
    let collection = collection.strip_prefix("b.").unwrap_or(collection).to_owned();
    Heard { name, collection, body }
}

fn say(stream: &mut TcpStream, document: &[u8]) -> std::io::Result<()> {
    let mut out = Vec::new();
    for number in [21 + document.len() as i32, 1, 0, 2013, 0] {
        out.extend_from_slice(&number.to_le_bytes());
    }
    out.push(0);
    out.extend_from_slice(document);
    stream.write_all(&out)
}

fn serve(stream: &mut TcpStream, behind: Option<u16>, script: &Script, all: &Mutex<Vec<Heard>>) -> std::io::Result<()> {
    let mut real = behind.map(|port| TcpStream::connect(("127.0.0.1", port))).transpose()?;
    loop {
        let asked = message(stream)?;
        let heard = heard_in(&asked);
        all.lock().unwrap().push(heard.clone());
        let does = (script.lock().unwrap())(&heard);
        let mut passed = || {
            let Some(real) = &mut real else {
                let is = fields! { "ok": 1, "maxWireVersion": 17, "isWritablePrimary": true };
                return Ok(bytes_of(&is));
            };
            real.write_all(&asked)?;
            let answer = message(real)?;
            Ok::<_, std::io::Error>(answer[21..].to_vec())
        };
        match does {
            Does::Pass => say(stream, &passed()?)?,
            Does::Say(document) => say(stream, &bytes_of(&document))?,
            Does::SayBytes(bytes) => say(stream, &bytes)?,
            Does::Cut => return Ok(()),
            Does::CutAfter => return passed().map(drop),
            Does::Trickle => {
                for number in [1_000_000, 1, 0, 2013] {
                    stream.write_all(&i32::to_le_bytes(number))?;
                }
                loop {
                    stream.write_all(&[0])?;
                    std::thread::sleep(Duration::from_millis(20));
                }
            }
        }
    }
}

fn bytes_of(document: &Document) -> Vec<u8> {
    let mut bytes = Vec::new();
    document.write(&mut bytes);
    bytes
}

/// An answer with documents. `id`: there are more.
pub fn batch(first: bool, id: i64, documents: Vec<Document>) -> Does {
    let documents: Vec<Value> = documents.into_iter().map(Value::Document).collect();
    let which = if first { "firstBatch" } else { "nextBatch" };
    let cursor = fields! { "id": Value::Long(id), "ns": "db.b.files" }.with(which, documents);
    Does::Say(fields! { "cursor": cursor, "ok": 1 })
}

/// Refused: this code, for the first document.
pub fn refusal(code: i32, text: &str) -> Document {
    let error = fields! { "index": 0, "code": code, "errmsg": text };
    fields! { "n": 0, "writeErrors": vec![error.into()], "ok": 1 }
}
