//! A server in memory, with exactly what S3 promises, so that the tree can be tested without a network.

use std::collections::BTreeMap;
use std::io::{self, Cursor, Read};
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;

use super::{Abilities, Body, Object, Objects, Page, Part, Upload, When, Words, condition_failed};
use crate::checksum;

const PAGE: usize = 7;

/// An upload's key, words and parts.
type Begun = (String, Words, BTreeMap<u32, Vec<u8>>);

#[derive(Default)]
struct Held {
    objects: BTreeMap<String, (Object, Vec<u8>)>,
    uploads: BTreeMap<String, Begun>,
    counter: i64,
    requests: u64,
}

#[derive(Default)]
pub struct Memory {
    held: Mutex<Held>,
    /// It honours no condition.
    unconditional: bool,
    /// Number of objects that it damages on arrival.
    pub corrupts: AtomicU32,
}

impl Memory {
    pub fn unconditional() -> Self {
        Self { unconditional: true, ..Self::default() }
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        held.requests += 1;
        held
    }
    pub fn requests(&self) -> u64 {
        self.held.lock().unwrap().requests
    }
    pub fn keys(&self) -> Vec<String> {
        self.held.lock().unwrap().objects.keys().cloned().collect()
    }
}

fn bytes_of(body: &dyn Body) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; body.len() as usize];
    body.read_at(&mut bytes, 0)?;
    Ok(bytes)
}

impl Held {
    fn set(&mut self, key: &str, bytes: Vec<u8>, sum: u64, words: &Words, when: When<'_>) -> io::Result<String> {
        if checksum::of_bytes(&bytes) != sum {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "BadDigest"));
        }
        let holds = match (when, self.objects.get(key)) {
            (When::Always, _) | (When::Absent, None) => true,
            (When::Is(etag), Some((object, _))) => object.etag == etag,
            _ => false,
        };
        if !holds {
            return Err(condition_failed(key));
        }
        self.counter += 1;
        let etag = format!("{sum:016x}-{}", self.counter);
        let object = Object {
            key: key.into(),
            size_bytes: bytes.len() as u64,
            etag: etag.clone(),
            modified_nanos: 1_700_000_000_000_000_000 + self.counter,
            words: Some(words.clone()),
            crc64nvme: Some(sum),
        };
        self.objects.insert(key.into(), (object, bytes));
        Ok(etag)
    }
}

impl Objects for Memory {
    fn describe(&self) -> String {
        "memory:".into()
    }
    fn abilities(&self) -> Abilities {
        Abilities {
            if_absent: !self.unconditional,
            if_same: !self.unconditional,
            checksums: true,
            copies: true,
            uploads_in_parts: true,
            holds_back: false,
            part_bytes_min: 5 << 20,
            part_bytes_max: 5 << 30,
            parts_max: 10_000,
            put_bytes_max: 5 << 30,
            copy_bytes_max: 5 << 30,
            object_bytes_max: 5 << 40,
            lists_any_key: true,
            key_bytes_max: 1024,
            words_bytes_max: 2048,
        }
    }
    fn head(&self, key: &str) -> io::Result<Option<Object>> {
        Ok(self.held().objects.get(key).map(|(object, _)| object.clone()))
    }
    fn get(&self, key: &str, range: Range<u64>, etag: Option<&str>) -> io::Result<Box<dyn Read + Send>> {
        let held = self.held();
        let (object, bytes) = held.objects.get(key).ok_or(Errno::NOENT)?;
        if etag.is_some_and(|etag| etag != object.etag) {
            return Err(condition_failed(key));
        }
        Ok(Box::new(Cursor::new(bytes[range.start as usize..range.end as usize].to_vec())))
    }
    fn list(&self, prefix: &str, delimited: bool, from: Option<&str>) -> io::Result<Page> {
        let held = self.held();
        let mut page = Page::default();
        let mut last = String::new();
        for (key, (object, _)) in held.objects.range(prefix.to_owned()..) {
            let Some(rest) = key.strip_prefix(prefix) else { break };
            let group = delimited.then(|| rest.find('/').map(|slash| format!("{prefix}{}", &rest[..=slash]))).flatten();
            let name = group.clone().unwrap_or_else(|| key.clone());
            if from.is_some_and(|from| name.as_str() <= from)
                || page.prefixes.last() == group.as_ref() && group.is_some()
            {
                continue;
            }
            if page.objects.len() + page.prefixes.len() == PAGE {
                page.next = Some(last);
                break;
            }
            last = name;
            match group {
                Some(group) => page.prefixes.push(group),
                None => page.objects.push(Object { words: None, crc64nvme: None, ..object.clone() }),
            }
        }
        Ok(page)
    }
    fn list_behind(&self, prefix: &str, key: &str) -> io::Result<Option<Page>> {
        self.list(prefix, false, Some(key)).map(Some)
    }
    fn put(&self, key: &str, body: &dyn Body, sum: u64, words: &Words, when: When<'_>) -> io::Result<String> {
        let bytes = bytes_of(body)?;
        assert!(!self.unconditional || when == When::Always, "a condition that the server ignores");
        let mut held = self.held();
        let etag = held.set(key, bytes, sum, words, when)?;
        let corrupts = |left: u32| left.checked_sub(1);
        if key != super::keys::MARK
            && self.corrupts.fetch_update(Ordering::Relaxed, Ordering::Relaxed, corrupts).is_ok()
        {
            let (object, bytes) = held.objects.get_mut(key).ok_or(Errno::IO)?;
            bytes[0] ^= 1;
            object.crc64nvme = None;
        }
        Ok(etag)
    }
    fn copy(&self, from: &str, etag: Option<&str>, to: &str, words: Option<&Words>) -> io::Result<String> {
        let mut held = self.held();
        let (object, bytes) = held.objects.get(from).cloned().ok_or(Errno::NOENT)?;
        if etag.is_some_and(|etag| etag != object.etag) {
            return Err(condition_failed(from));
        }
        let words = words.cloned().or(object.words).unwrap_or_default();
        let sum = checksum::of_bytes(&bytes);
        held.set(to, bytes, sum, &words, When::Always)
    }
    fn delete(&self, key: &str) -> io::Result<()> {
        self.held().objects.remove(key);
        Ok(())
    }
    fn begin(&self, key: &str, words: &Words) -> io::Result<String> {
        let mut held = self.held();
        held.counter += 1;
        let id = format!("upload-{}", held.counter);
        held.uploads.insert(id.clone(), (key.into(), words.clone(), BTreeMap::new()));
        Ok(id)
    }
    fn part(&self, _key: &str, id: &str, number: u32, body: &dyn Body, sum: u64) -> io::Result<Part> {
        let bytes = bytes_of(body)?;
        if checksum::of_bytes(&bytes) != sum {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "BadDigest"));
        }
        let part = Part { number, size_bytes: bytes.len() as u64, etag: format!("{sum:016x}"), crc64nvme: Some(sum) };
        self.held().uploads.get_mut(id).ok_or(Errno::NOENT)?.2.insert(number, bytes);
        Ok(part)
    }
    fn part_of(&self, key: &str, id: &str, number: u32, from: &str, range: Range<u64>, etag: &str) -> io::Result<Part> {
        let mut bytes = Vec::new();
        self.get(from, range, Some(etag))?.read_to_end(&mut bytes)?;
        self.part(key, id, number, &&*bytes, checksum::of_bytes(&bytes))
    }
    fn parts(&self, _key: &str, id: &str) -> io::Result<Vec<Part>> {
        let held = self.held();
        let (.., parts) = held.uploads.get(id).ok_or(Errno::NOENT)?;
        let part = |(number, bytes): (&u32, &Vec<u8>)| {
            let sum = checksum::of_bytes(bytes);
            Part { number: *number, size_bytes: bytes.len() as u64, etag: format!("{sum:016x}"), crc64nvme: Some(sum) }
        };
        Ok(parts.iter().map(part).collect())
    }
    fn complete(&self, key: &str, id: &str, parts: &[Part], sum: u64, when: When<'_>) -> io::Result<String> {
        let mut held = self.held();
        let (_, words, there) = held.uploads.get(id).cloned().ok_or(Errno::NOENT)?;
        let mut bytes = Vec::new();
        for part in parts {
            bytes.extend(there.get(&part.number).ok_or(Errno::INVAL)?);
        }
        let etag = held.set(key, bytes, sum, &words, when)?;
        held.uploads.remove(id);
        Ok(etag)
    }
    fn abort(&self, _key: &str, id: &str) -> io::Result<()> {
        self.held().uploads.remove(id);
        Ok(())
    }
    fn uploads(&self, prefix: &str) -> io::Result<Vec<Upload>> {
        let held = self.held();
        let upload = |(id, (key, ..)): (&String, &Begun)| Upload { key: key.clone(), id: id.clone(), begun_nanos: 0 };
        Ok(held.uploads.iter().map(upload).filter(|upload| upload.key.starts_with(prefix)).collect())
    }
}
