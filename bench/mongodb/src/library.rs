//! The requests of the GridFS driver, made with MongoDB's crate: the same commands in the same order, with the same bytes.
//!
//! Each request has a time limit and is not repeated, as in the driver. (It uses `run_raw_command`, because `insert_many` takes ten
//! times the processor time for the chunks of a large file.)

use std::sync::Mutex;
use std::time::Duration;

use mongodb::bson::oid::ObjectId;
use mongodb::bson::spec::BinarySubtype;
use mongodb::bson::{Bson, DateTime, Document, RawArrayBuf, RawBinaryRef, RawDocumentBuf, doc, raw::cstr, rawdoc};
use mongodb::options::{ClientOptions, ServerAddress, ServerMonitoringMode};
use mongodb::{Client, Database};
use surgetank_store::at_once;
use tokio::runtime::Runtime;

use crate::{CHUNK_BYTES, Driver, Outcome, PART_CHUNKS};

const REQUEST: Duration = Duration::from_secs(300);
/// Chunks of one message, or of one answer.
const TOGETHER: usize = 32;

pub struct Library {
    runtime: Runtime,
    database: Database,
}

fn durable() -> Document {
    doc! { "w": "majority", "j": true }
}

impl Library {
    pub fn new(port: u16) -> Outcome<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let mut options = ClientOptions::default();
        options.hosts = vec![ServerAddress::Tcp { host: "127.0.0.1".to_owned(), port: Some(port) }];
        options.direct_connection = Some(true);
        options.max_pool_size = Some(64);
        options.retry_reads = Some(false);
        options.retry_writes = Some(false);
        options.server_monitoring_mode = Some(ServerMonitoringMode::Poll);
        let client = {
            let _inside = runtime.enter();
            Client::with_options(options)?
        };
        Ok(Self { runtime, database: client.database("db") })
    }

    fn ask_raw(&self, command: RawDocumentBuf) -> Outcome<Document> {
        let work = self.database.run_raw_command(command);
        let answer = self.runtime.block_on(async { tokio::time::timeout(REQUEST, work.into_future()).await })??;
        match answer.get("writeErrors").or(answer.get("writeConcernError")) {
            Some(why) => Err(format!("refused: {why}").into()),
            None => Ok(answer),
        }
    }

    fn ask(&self, command: Document) -> Outcome<Document> {
        self.ask_raw(RawDocumentBuf::try_from(&command)?)
    }

    /// The number of documents found, and the bytes of their field `data`.
    fn find(&self, command: Document) -> Outcome<(usize, usize)> {
        let command = RawDocumentBuf::try_from(&command)?;
        let work = async {
            use futures_core::Stream;
            let mut cursor = self.database.run_raw_cursor_command(command).batch().await?;
            let (mut count, mut bytes) = (0, 0);
            while let Some(batch) = std::future::poll_fn(|cx| std::pin::Pin::new(&mut cursor).poll_next(cx)).await {
                for one in batch?.doc_slices()? {
                    count += 1;
                    let data = one?.as_document().and_then(|one| one.get("data").ok().flatten());
                    bytes += data.and_then(|data| data.as_binary()).map_or(0, |data| data.bytes.to_vec().len());
                }
            }
            Ok::<_, mongodb::error::Error>((count, bytes))
        };
        Ok(self.runtime.block_on(async { tokio::time::timeout(REQUEST, work).await })??)
    }

    fn find_one(&self, collection: &str, filter: Document, sort: Document) -> Outcome<usize> {
        let command = doc! {
            "find": collection, "filter": filter, "sort": sort, "limit": 1, "batchSize": 1, "singleBatch": true,
        };
        self.find(command).map(|(count, _)| count)
    }

    fn send(&self, id: ObjectId, first: usize, content: &[u8]) -> Outcome<()> {
        for (nth, some) in content.chunks(TOGETHER * CHUNK_BYTES).enumerate() {
            let mut documents = RawArrayBuf::new();
            for (within, bytes) in some.chunks(CHUNK_BYTES).enumerate() {
                let number = i32::try_from(first + nth * TOGETHER + within)?;
                let mut chunk = rawdoc! { "_id": ObjectId::new(), "files_id": id, "n": number };
                chunk.append(cstr!("data"), RawBinaryRef { subtype: BinarySubtype::Generic, bytes });
                chunk.append(cstr!("by"), "surgetank");
                documents.push(chunk);
            }
            let mut command = rawdoc! { "insert": "b.chunks", "ordered": false };
            command.append(cstr!("writeConcern"), RawDocumentBuf::try_from(&durable())?);
            command.append(cstr!("documents"), documents);
            self.ask_raw(command)?;
        }
        Ok(())
    }

    fn insert(&self, collection: &str, document: Document, sure: Document) -> Outcome<()> {
        let command = doc! { "insert": collection, "ordered": false, "writeConcern": sure, "documents": [document] };
        self.ask(command).map(drop)
    }

    fn delete(&self, collection: &str, filter: Document, sure: Document) -> Outcome<()> {
        let deletes = doc! { "q": filter, "limit": 0 };
        self.ask(doc! { "delete": collection, "deletes": [deletes], "writeConcern": sure }).map(drop)
    }

    /// Under the name's lock.
    fn show(&self, key: &str, id: ObjectId, length: usize, is_upload: bool) -> Outcome<()> {
        let me = ObjectId::new();
        self.insert("b.surgetank.locks", doc! { "_id": key, "by": me }, doc! { "w": 1 })?;
        let versions = doc! {
            "find": "b.files", "filter": { "filename": key }, "sort": { "uploadDate": -1, "_id": -1 }, "batchSize": 1000,
        };
        self.find(versions)?;
        let file = doc! {
            "_id": id, "filename": key, "length": i64::try_from(length)?, "chunkSize": i32::try_from(CHUNK_BYTES)?,
            "uploadDate": DateTime::now(), "metadata": { "surgetank": { "words": {}, "version": me.to_hex() } },
        };
        self.insert("b.files", file, durable())?;
        if is_upload {
            self.find_one("b.surgetank.uploads", doc! { "_id": id }, doc! {})?;
        }
        self.delete("b.surgetank.locks", doc! { "_id": key, "by": me }, doc! { "w": 1 })
    }
}

impl Driver for Library {
    fn name(&self) -> &'static str {
        "MongoDB's"
    }

    fn stat(&self, key: &str) -> Outcome<()> {
        self.find_one("b.files", doc! { "filename": key }, doc! { "uploadDate": -1, "_id": -1 }).map(drop)
    }

    fn publish_small(&self, key: &str, content: &[u8]) -> Outcome<()> {
        let id = ObjectId::new();
        self.send(id, 0, content)?;
        self.show(key, id, content.len(), false)
    }

    fn publish_large(&self, key: &str, part: &[u8], count: usize, threads: usize) -> Outcome<()> {
        let id = ObjectId::new();
        self.insert("b.surgetank.uploads", doc! { "_id": id, "filename": key, "words": {} }, durable())?;
        let failed = Mutex::new(None);
        at_once(count, threads, &|nth| {
            let sent = self.send(id, nth * PART_CHUNKS, part).and_then(|()| {
                let part = doc! { "upload": id, "number": i64::try_from(nth)?, "bytes": i64::try_from(part.len())? };
                let update = doc! { "q": { "_id": format!("{id}/{nth}") }, "u": part, "upsert": true };
                self.ask(doc! { "update": "b.surgetank.parts", "updates": [update], "writeConcern": durable() })?;
                self.find_one("b.surgetank.uploads", doc! { "_id": id }, doc! {}).map(drop)
            });
            sent.map_err(|why| {
                let error = std::io::Error::other(why.to_string());
                failed.lock().map(|mut failed| *failed = Some(why)).ok();
                error
            })
        })?;
        self.find_one("b.surgetank.uploads", doc! { "_id": id }, doc! {})?;
        self.find(doc! { "find": "b.surgetank.parts", "filter": { "upload": id }, "batchSize": 1000 })?;
        self.show(key, id, part.len() * count, true)?;
        self.delete("b.surgetank.parts", doc! { "upload": id }, durable())?;
        self.delete("b.surgetank.uploads", doc! { "_id": id }, durable())
    }

    fn read_large(&self, key: &str, length: usize) -> Outcome<()> {
        let file = doc! { "find": "b.files", "filter": { "filename": key }, "limit": 1, "singleBatch": true };
        let answer = self.ask(file)?;
        let found = answer.get_document("cursor")?.get_array("firstBatch")?;
        let id = found.first().and_then(Bson::as_document).ok_or("no file")?.get_object_id("_id")?;
        let (mut first, mut read) = (0, 0);
        while read < length {
            let numbers = doc! { "$gte": i32::try_from(first)?, "$lt": i32::try_from(first + TOGETHER)? };
            let limit = i32::try_from(TOGETHER)?;
            let (_, bytes) = self.find(doc! {
                "find": "b.chunks", "filter": { "files_id": id, "n": numbers }, "sort": { "n": 1 },
                "projection": { "n": 1, "data": 1 }, "limit": limit, "batchSize": limit + 1,
            })?;
            self.find_one("b.files", doc! { "_id": id }, doc! {})?;
            if bytes == 0 {
                return Err("a chunk is missing".into());
            }
            (first, read) = (first + TOGETHER, read + bytes);
        }
        Ok(())
    }

    fn clear(&self) -> Outcome<()> {
        for collection in ["b.files", "b.chunks"] {
            self.delete(collection, doc! {}, doc! { "w": 1 })?;
        }
        Ok(())
    }
}
