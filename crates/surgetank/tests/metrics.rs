//! The metrics as Prometheus gets them: the content, the clients that may read them, and the events that they
//! survive.
#![allow(clippy::unwrap_used, reason = "a test reports by a panic")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::scene::{MIB, Running, Scene, USER, eventually};
use serde_json::Value;

/// The command of a run that waits for a signal to continue.
const HELD: &str = "touch /mnt/beside/ready; until [ -e /mnt/beside/go ]; do sleep 0.01; done";

struct Served {
    scene: Scene,
    port: u16,
    running: Option<Running>,
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn prepare(scene: Option<Scene>) -> Option<Served> {
    let mut scene = scene?;
    scene.tier("fast", 32);
    scene.beside("beside");
    Some(Served { scene, port: free_port(), running: None })
}

impl Served {
    /// Returns when `script` is done; the run continues.
    fn begin(&mut self, options: &[&str], script: &str) {
        let port = self.port.to_string();
        let options = [&["--metrics", port.as_str()], options].concat();
        self.running = Some(self.scene.start(&options, &format!("{script}\n{HELD}")));
        eventually("the run is ready", || Path::new("/mnt/beside/ready").exists());
    }

    fn end(&mut self) {
        fs::write("/mnt/beside/go", "").unwrap();
        self.running.take().unwrap().ends().exits(0);
    }

    fn token(&self) -> String {
        fs::read_to_string(self.scene.state.join("metrics-token")).unwrap().trim().to_owned()
    }

    /// Status and body of an answer to the raw `request`.
    fn ask(&self, request: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        stream.set_read_timeout(Some(crate::scene::LIMIT)).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{text:?} to {request:?}"));
        (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
    }

    fn get(&self, path: &str, token: &str) -> (u16, String) {
        self.ask(&format!("GET {path} HTTP/1.1\r\nHost: here\r\nAuthorization: Bearer {token}\r\n\r\n"))
    }

    #[track_caller]
    fn metrics(&self) -> String {
        let (status, body) = self.get("/metrics", &self.token());
        assert_eq!(status, 200, "{body}");
        body
    }

    #[track_caller]
    fn value(&self, sample: &str) -> f64 {
        let text = self.metrics();
        let line = text.lines().find_map(|line| line.strip_prefix(sample)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("{sample} is not in\n{text}")).parse().unwrap()
    }
}

/// A client that does not share the tests' code, run as this user: status and body.
fn fetched_by_python(user: u32, port: u16, token: &str) -> String {
    const FETCH: &str = r#"
import sys, urllib.error, urllib.request
request = urllib.request.Request(f"http://127.0.0.1:{sys.argv[1]}/metrics", headers={"Authorization": "Bearer " + sys.argv[2]})
try:
    with urllib.request.urlopen(request, timeout=60) as answer:
        print(answer.status, answer.headers["Content-Type"])
        print(answer.read().decode(), end="")
except urllib.error.HTTPError as error:
    print(error.code, error.headers["WWW-Authenticate"])
"#;
    let id = user.to_string();
    let output = Command::new("setpriv")
        .args(["--reuid", &id, "--regid", &id, "--clear-groups", "--", "/usr/bin/python3", "-c", FETCH])
        .args([&port.to_string(), token])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Name → type and labels.
fn families(text: &str) -> BTreeMap<String, (String, BTreeSet<String>)> {
    let mut families: BTreeMap<String, (String, BTreeSet<String>)> = BTreeMap::new();
    for line in text.lines() {
        if let Some(kind) = line.strip_prefix("# TYPE ") {
            let (name, kind) = kind.split_once(' ').unwrap();
            families.insert(name.to_owned(), (kind.to_owned(), BTreeSet::new()));
        } else if let Some((name, labels)) = line.split_once('{').filter(|_| !line.starts_with('#')) {
            let known = &mut families.get_mut(name).unwrap().1;
            let mut rest = labels;
            while let Some((label, tail)) = rest.split_once("=\"") {
                known.insert(label.to_owned());
                rest = tail.split_once('"').map_or("", |(_, rest)| rest.trim_start_matches(','));
            }
        }
    }
    families
}

fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

#[test]
fn run_figures_are_served_to_prometheus() {
    let Some(mut served) = prepare(Scene::new("metrics_run")) else { return };
    // Another member of a pool has a directory in which the run makes a name.
    let pool = ["--pool", "test", "--pool-host", "127.0.0.1", "--pool-secret", "/mnt/beside/secret"];
    let other = served.scene.beside("other");
    fs::create_dir(served.scene.over.join("theirs")).unwrap();
    let words = [&pool[..], &["--store", "/mnt/project", "--tier", "fast=/mnt/beside:8M", "/mnt/other"]].concat();
    served.scene.verb("mount", &words).exits(0);
    fs::write(other.join("theirs/first"), "").unwrap();
    let script = "mkdir theirs/x; head -c 3M /dev/zero >a; env -u LD_PRELOAD cat a >/dev/null; python3 -c 'open(\"b\",\"w\").write(\"x\")'; mkdir d; mv b d/c";
    served.begin(&[&["--deadline", "2h"], &pool[..]].concat(), script);
    eventually("all files are drained", || {
        served.value("surgetank_drain_files_total") == 2.0 && served.value("surgetank_queue_files") == 0.0
    });
    let fetched = fetched_by_python(0, served.port, &served.token());
    let (head, text) = fetched.split_once('\n').unwrap();
    assert_eq!(head, "200 text/plain; version=0.0.4; charset=utf-8");
    for (sample, value) in [
        ("surgetank_runs", 1),
        ("surgetank_tier_capacity_bytes{tier=\"fast\"}", 32 * MIB),
        ("surgetank_tier_used_bytes{tier=\"fast\"}", 3 * MIB + 4096),
        ("surgetank_tier_undrained_bytes{tier=\"fast\"}", 0),
        ("surgetank_tier_files{tier=\"fast\"}", 2),
        ("surgetank_tier_devices{tier=\"fast\",health=\"well\"}", 1),
        ("surgetank_tier_devices{tier=\"fast\",health=\"sick\"}", 0),
        ("surgetank_tier_written_bytes_total{tier=\"fast\"}", 3 * MIB + 1),
        ("surgetank_drain_bytes_total", 3 * MIB + 1),
        ("surgetank_drain_failures_total", 0),
        ("surgetank_queue_bytes", 0),
        ("surgetank_agent_replacements_total", 0),
        ("surgetank_pool_members", 2),
    ] {
        let line = text.lines().find_map(|line| line.strip_prefix(sample)?.strip_prefix(' '));
        let near = |seen: f64| sample.contains("used_bytes") && (seen - value as f64).abs() <= 4096.0;
        let seen: f64 = line.unwrap_or_else(|| panic!("{sample} is not in\n{text}")).parse().unwrap();
        assert!(seen == value as f64 || near(seen), "{sample} is {seen}, not {value}");
    }
    assert!(
        served.value("surgetank_deadline_timestamp_seconds") > served.value("surgetank_start_time_seconds") + 7000.0
    );
    assert!(served.value("process_resident_memory_bytes") > MIB as f64);
    // The agent may have made a copy again.
    assert!(served.value("surgetank_tier_read_bytes_total{tier=\"fast\"}") >= (3 * MIB + 1) as f64);
    let calls = served.value("surgetank_pool_calls_total{member=\"1\"}");
    let sent = served.value("surgetank_pool_network_bytes_total{member=\"1\",direction=\"sent\"}");
    assert!(calls >= 3.0 && sent >= calls * 8.0, "{calls} calls, {sent} bytes");
    let hits = served.value("surgetank_tier_hits_total{tier=\"fast\"}")
        + served.value("surgetank_opens_total{way=\"direct\"}");
    assert!(hits > 0.0);

    let mut promtool = Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    promtool.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let output = promtool.wait_with_output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));

    let families = families(text);
    let page = fs::read_to_string(repository("docs/metrics.md")).unwrap();
    let table: BTreeMap<String, (String, BTreeSet<String>)> = page
        .lines()
        .filter_map(|line| {
            let cells: Vec<&str> = line.strip_prefix("| `")?.split('|').map(str::trim).collect();
            let labels =
                cells[2].split(", ").map(|label| label.trim_matches('`').to_owned()).filter(|label| !label.is_empty());
            Some((cells[0].trim_matches('`').to_owned(), (cells[1].to_owned(), labels.collect())))
        })
        .collect();
    assert_eq!(table, families, "docs/metrics.md (left) and what is served");
    for help in text.lines().filter_map(|line| line.strip_prefix("# HELP ")) {
        let (name, help) = help.split_once(' ').unwrap();
        assert!(page.contains(&format!("| {help} |")), "{name}: docs/metrics.md does not say: {help}");
    }
    every_query_of_the_dashboard_names(&families);
    served.end();
    served.scene.verb("umount", &["/mnt/other"]).exits(0);
    eventually("the port closes with the agent", || TcpStream::connect(("127.0.0.1", served.port)).is_err());
}

/// Checks that every query names families that exist, with labels that they have.
fn every_query_of_the_dashboard_names(families: &BTreeMap<String, (String, BTreeSet<String>)>) {
    let dashboard: Value =
        serde_json::from_slice(&fs::read(repository("deploy/grafana/surgetank.json")).unwrap()).unwrap();
    let mut queries = Vec::new();
    let mut left = vec![&dashboard];
    while let Some(value) = left.pop() {
        match value {
            Value::Object(fields) => {
                queries.extend(["expr", "query"].iter().filter_map(|name| fields.get(*name)?.as_str()));
                left.extend(fields.values());
            }
            Value::Array(items) => left.extend(items),
            _ => {}
        }
    }
    let mut named = BTreeSet::new();
    for query in &queries {
        let mut rest = *query;
        while let Some(at) = ["surgetank_", "process_"].iter().filter_map(|prefix| rest.find(prefix)).min() {
            let tail = &rest[at..];
            let end = tail.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(tail.len());
            let (_, labels) = families.get(&tail[..end]).unwrap_or_else(|| panic!("{} in {query}", &tail[..end]));
            named.insert(&tail[..end]);
            rest = &tail[end..];
            if let Some(selected) = rest.strip_prefix('{') {
                for label in selected.split('}').next().unwrap().split(',') {
                    let label = label.split(['=', '!']).next().unwrap();
                    assert!(label == "instance" || labels.contains(label), "{label} in {query}");
                }
            }
        }
    }
    assert!(queries.len() > 20 && named.len() > 15, "{} queries, {} metrics", queries.len(), named.len());
}

/// Regression: the gauge grew with every closed version of a file, and never fell.
#[test]
fn tier_files_gauge_counts_present_files() {
    let Some(mut served) = prepare(Scene::new("metrics_gauge")) else { return };
    served.begin(&[], "for i in 1 2 3 4 5; do echo $i >again; done; echo removed >removed; rm removed");
    eventually("the gauge counts the one remaining file", || {
        served.value("surgetank_tier_files{tier=\"fast\"}") == 1.0
    });
    served.end();
}

#[test]
fn next_agent_answers_at_the_same_port() {
    let Some(mut served) = prepare(Scene::new("metrics_survive")) else { return };
    served.begin(&[], "echo one >a");
    let token = served.token();
    served.metrics();
    served.scene.replace_agent();
    // A request during the change of agents waits for the answer of the next agent.
    let (status, text) = served.get("/metrics", &token);
    assert_eq!(status, 200);
    assert!(text.contains("\nsurgetank_agent_replacements_total 1\n"), "{text}");
    eventually("the next agent knows the run", || served.value("surgetank_runs") == 1.0);
    served.end();
}

#[test]
fn request_without_the_token_gets_nothing() {
    let Some(mut served) = prepare(Scene::of_user("metrics_others")) else { return };
    served.begin(&[], "echo one >a");
    let token = served.token();
    assert!(fetched_by_python(USER, served.port, &token).starts_with("200 "));
    assert_eq!(fetched_by_python(USER + 1, served.port, "a guess of enough letters"), "401 Bearer\n");
    for path in ["/metrics", "/", "/debug/pprof"] {
        assert_eq!(served.get(path, "").0, 401, "{path}");
    }
    for path in ["/", "/metrics/", "/metrics/..", "/state/metrics-token"] {
        assert_eq!(served.get(path, &token).0, 404, "{path}");
    }
    let delete = format!("DELETE /metrics HTTP/1.1\r\nAuthorization: Bearer {token}\r\n\r\n");
    assert_eq!(served.ask(&delete).0, 405);
    let head = format!("HEAD /metrics HTTP/1.1\r\nAuthorization: Bearer {token}\r\n\r\n");
    assert_eq!(served.ask(&head), (200, String::new()));
    served.end();
}

#[test]
fn bad_requests_do_not_block_a_scraper() {
    let Some(mut served) = prepare(Scene::new("metrics_hostile")) else { return };
    served.begin(&[], "echo one >a");
    assert_eq!(served.ask("nonsense\r\n\r\n").0, 400);
    assert_eq!(served.ask(&"x".repeat(10_000)).0, 431);
    let address = ("127.0.0.1", served.port);
    // Many connections that send nothing, or an incomplete request, or do not read the answer.
    let mut idle: Vec<TcpStream> = (0..200).map(|_| TcpStream::connect(address).unwrap()).collect();
    for (index, stream) in idle.iter_mut().enumerate() {
        let begun = [&b"GET /met"[..], b"", b"GET /metrics HTTP/1.1\r\n\r\n"][index % 3];
        // The agent has already closed some of them, because there are too many.
        let _ = stream.write_all(begun);
    }
    served.metrics();
    // One that sends without end.
    let mut endless = TcpStream::connect(address).unwrap();
    endless.set_write_timeout(Some(Duration::from_secs(30))).unwrap();
    let sent = (0..1000).take_while(|_| endless.write_all(&[b'x'; 65_536]).is_ok()).count();
    assert!(sent < 1000, "the agent closes the connection");
    served.metrics();
    let descriptors = || served.value("process_open_fds");
    drop(idle);
    eventually("the descriptors of the connections are closed", || descriptors() < 100.0);
    served.end();
}

/// Regression: the agent closed the oldest connection first. With 32 new connections between a scraper's connect and
/// its request, the scraper never had an answer.
#[test]
fn flood_of_connections_leaves_a_scraper_a_chance() {
    let Some(mut served) = prepare(Scene::new("metrics_flood")) else { return };
    served.begin(&[], "echo one >a");
    let request = format!("GET /metrics HTTP/1.1\r\nAuthorization: Bearer {}\r\n\r\n", served.token());
    let connect = || TcpStream::connect(("127.0.0.1", served.port)).unwrap();
    let mut held: Vec<TcpStream> = Vec::new();
    // The scraper's connection survives the flood with a chance of one in four.
    let answered = (0..60).any(|_| {
        let mut scraper = connect();
        held.extend((0..45).map(|_| connect()));
        std::thread::sleep(Duration::from_millis(50));
        let mut text = String::new();
        let asked = scraper.write_all(request.as_bytes()).and_then(|()| scraper.read_to_string(&mut text));
        asked.is_ok() && text.starts_with("HTTP/1.1 200 ")
    });
    assert!(answered);
    served.end();
}

#[test]
fn port_in_use_is_reported_before_the_run_begins() {
    let Some(mut served) = prepare(Scene::new("metrics_in_use")) else { return };
    served.begin(&[], "echo one >a");
    let address = format!("127.0.0.1:{}", served.port);
    let other = served.scene.beside("other");
    let state = served.scene.state.to_str().unwrap();
    let words = ["run", "--over", other.to_str().unwrap(), "--state", state, "--tier", "t=/dev/shm:8M"];
    let refused =
        Running::of(served.scene.surgetank(&[&words[..], &["--metrics", &address, "--", "touch", "x"]].concat()))
            .ends();
    assert_ne!(refused.status.code(), Some(0));
    let refused = refused.says(&[&address, "another program has this port", "nothing was begun"]);
    assert!(!other.join("x").exists(), "{}", refused.stderr);
    let (port, open) = (served.port.to_string(), free_port());
    // A run that joins uses the agent's present port, and the run reports that.
    let joined = served.scene.run(&["--metrics", &open.to_string()], "cat a").exits(0).says(&["--metrics"]);
    joined.prints("one\n");
    let everywhere = format!("0.0.0.0:{port}");
    let words = [&words[..], &["--metrics", &everywhere, "--metrics-token-file", "none", "--", "true"]].concat();
    let refused = Running::of(served.scene.surgetank(&words)).ends();
    assert_ne!(refused.status.code(), Some(0));
    refused.says(&["--metrics-token-file", "every user in the network"]);
    served.end();
}

#[test]
fn metrics_without_a_mount_are_the_same() {
    let Some(mut served) = prepare(Scene::new("metrics_seccomp")) else { return };
    served.begin(&["--door", "seccomp", "--metrics-token-file", "none"], "head -c 1M /dev/zero >a");
    let (status, text) = served.ask("GET /metrics HTTP/1.1\r\n\r\n");
    assert_eq!(status, 200);
    assert!(text.contains("\nsurgetank_tier_files{tier=\"fast\"} 1\n"), "{text}");
    assert!(!served.scene.state.join("metrics-token").exists());
    served.end();
}
