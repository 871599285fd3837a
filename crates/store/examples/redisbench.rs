//! Measures the Redis driver on a server, beside the limit: the result of `redis-benchmark` on the same server with values of
//! the same size and the same number of clients.
//!
//! usage: redisbench URL small [--objects N] [--bytes N] [--threads N]
//!        redisbench URL large [--bytes N] [--threads N]
//!        redisbench URL list [--objects N]

use std::io::Read;
use std::process::Command;
use std::time::Instant;

use surgetank_store::at_once;
use surgetank_store::checksum::{joined, of_bytes};
use surgetank_store::object::{Objects, Part, When, Words};
use surgetank_store::redis::{Place, Redis};

type Outcome<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

const MIB: u64 = 1 << 20;

fn main() -> Outcome<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let (Some(url), Some(what)) = (words.first(), words.get(1)) else {
        return Err("usage: redisbench URL small|large|list [--objects N] [--bytes N] [--threads N]".into());
    };
    let option = |name: &str, usual: usize| -> Outcome<usize> {
        let at = words.iter().position(|word| word == name).and_then(|at| words.get(at + 1));
        Ok(at.map_or(Ok(usual), |value| value.parse())?)
    };
    let place = Place::parse(url)?;
    let store = Redis::open(place.clone())?;
    match what.as_str() {
        "small" => {
            let (objects, bytes) = (option("--objects", 10_000)?, option("--bytes", 4096)?);
            small(&store, &place, objects, bytes, option("--threads", 16)?)?;
        }
        "large" => large(&store, &place, option("--bytes", 256 << 20)?, option("--threads", 4)?)?,
        "list" => list(&store, option("--objects", 100_000)?)?,
        other => return Err(format!("{other}: small, large or list").into()),
    }
    println!("{:?}", store.counters());
    Ok(())
}

fn small(store: &Redis, place: &Place, objects: usize, bytes: usize, threads: usize) -> Outcome<()> {
    let content = vec![0x5a; bytes];
    let sum = of_bytes(&content);
    let each = |name: &str, one: &(dyn Fn(&str) -> std::io::Result<()> + Sync)| -> Outcome<()> {
        let began = Instant::now();
        at_once(objects, threads, &|nth| one(&format!("small/{nth:08}")))?;
        show(name, began, objects, objects * bytes);
        Ok(())
    };
    each("put", &|key| store.put(key, &content.as_slice(), sum, &Words::new(), When::Absent).map(drop))?;
    each("head", &|key| store.head(key).map(drop))?;
    each("get", &|key| store.get(key, 0..bytes as u64, None)?.read_exact(&mut vec![0; bytes]))?;
    each("delete", &|key| store.delete(key))?;
    limit(place, objects, bytes, threads)
}

fn large(store: &Redis, place: &Place, bytes: usize, threads: usize) -> Outcome<()> {
    let part_bytes = usize::try_from(store.abilities().part_bytes_min)?;
    let content = vec![0x5a; part_bytes];
    let (sum, count) = (of_bytes(&content), bytes / part_bytes);
    let began = Instant::now();
    let id = store.begin("large", &Words::new())?;
    at_once(count, threads, &|nth| store.part("large", &id, nth as u32 + 1, &content.as_slice(), sum).map(drop))?;
    show("upload parts", began, count, bytes);
    let parts: Vec<Part> = store.parts("large", &id)?;
    let whole = parts.iter().fold(of_bytes(b""), |whole, part| joined(whole, sum, part.size_bytes));
    let completing = Instant::now();
    store.complete("large", &id, &parts, whole, When::Always)?;
    show("complete", completing, 1, bytes);
    let began = Instant::now();
    at_once(count, threads, &|nth| {
        let start = (nth * part_bytes) as u64;
        let mut read = vec![0; part_bytes];
        store.get("large", start..start + part_bytes as u64, None)?.read_exact(&mut read)
    })?;
    show("download", began, count, bytes);
    let began = Instant::now();
    store.copy("large", None, "copy", None)?;
    show("copy", began, 1, bytes);
    store.delete("copy")?;
    store.delete("large")?;
    limit(place, count, part_bytes, threads)
}

fn list(store: &Redis, objects: usize) -> Outcome<()> {
    let key = |nth: usize| format!("in/{:03}/{nth:06}", nth % 100);
    at_once(objects, 16, &|nth| {
        store.put(&key(nth), &&b"x"[..], of_bytes(b"x"), &Words::new(), When::Always).map(drop)
    })?;
    for (name, prefix, delimited) in [
        ("first, with a scan", "in/", true),
        ("directories", "in/", true),
        ("one directory", "in/007/", true),
        ("all", "", false),
    ] {
        let (began, mut from, mut found) = (Instant::now(), None, 0);
        loop {
            let page = store.list(prefix, delimited, from.as_deref())?;
            found += page.objects.len() + page.prefixes.len();
            from = page.next;
            if from.is_none() {
                break;
            }
        }
        show(name, began, found, 0);
    }
    Ok(at_once(objects, 16, &|nth| store.delete(&key(nth)))?)
}

/// Plain SET and GET.
fn limit(place: &Place, objects: usize, bytes: usize, threads: usize) -> Outcome<()> {
    let numbers = ["-n".into(), objects.to_string(), "-d".into(), bytes.to_string(), "-c".into(), threads.to_string()];
    let node = &place.nodes[0];
    let address = ["-h".into(), node.host.clone(), "-p".into(), node.port.to_string()];
    let output =
        Command::new("redis-benchmark").args(address).args(numbers).args(["-t", "set,get", "--csv"]).output()?;
    println!("redis-benchmark:\n{}", String::from_utf8_lossy(&output.stdout).trim());
    Ok(())
}

fn show(what: &str, began: Instant, objects: usize, bytes: usize) {
    let seconds = began.elapsed().as_secs_f64();
    let mib = bytes as f64 / MIB as f64;
    println!("{what}: {objects} in {seconds:.3} s, {:.0}/s, {:.1} MiB/s", objects as f64 / seconds, mib / seconds);
}
