//! A network of nodes on one machine: each node has a network namespace of its own, and a link to one switch.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

/// The namespaces end with their processes.
pub struct Network {
    nodes: Vec<Child>,
    switch: Child,
}

/// What is cut off of a node's traffic with all others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cut {
    All,
    /// What the node sends.
    Sent,
    /// What the others send to it.
    Received,
}

fn namespace() -> Child {
    let mut command = Command::new("unshare");
    command.args(["--net", "sh", "-c", "echo up; exec sleep 100000"]);
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "up\n", "no network namespace can be made");
    child
}

fn in_it(of: &Child, program: &str) -> Command {
    let mut command = Command::new("nsenter");
    command.args(["--net", "--target", &of.id().to_string(), program]);
    command
}

fn ip(of: &Child, words: &str) {
    let done = in_it(of, "ip").args(words.split(' ')).output().unwrap();
    assert!(done.status.success(), "ip {words}: {done:?}");
}

impl Network {
    pub fn new(nodes: usize) -> Self {
        let switch = namespace();
        ip(&switch, "link add bridge type bridge");
        ip(&switch, "link set bridge up");
        let nodes = (0..nodes).map(|number| {
            let node = namespace();
            let (port, host) = (format!("port{number}"), Self::host(number));
            ip(&node, &format!("link add eth0 type veth peer name {port} netns {}", switch.id()));
            ip(&switch, &format!("link set {port} master bridge up"));
            ip(&node, &format!("address add {host}/24 dev eth0"));
            ip(&node, "link set lo up");
            ip(&node, "link set eth0 up");
            node
        });
        Self { nodes: nodes.collect(), switch }
    }

    /// The address of a node.
    pub fn host(number: usize) -> String {
        format!("10.88.0.{}", number + 1)
    }

    /// The process whose namespace the node has.
    pub fn process(&self, number: usize) -> u32 {
        self.nodes[number].id()
    }

    pub fn cut(&self, number: usize, cut: Cut) {
        self.set(number, cut, true);
    }

    pub fn heal(&self, number: usize, cut: Cut) {
        self.set(number, cut, false);
    }

    fn set(&self, number: usize, cut: Cut, is_cut: bool) {
        let node = &self.nodes[number];
        let change = if is_cut { "add" } else { "delete" };
        // (What has no way is dropped by the sender's kernel.)
        let away = |from: &Child, to: usize| ip(from, &format!("route {change} blackhole {}/32", Self::host(to)));
        let others = (0..self.nodes.len()).filter(|other| *other != number);
        match cut {
            Cut::All => ip(node, if is_cut { "link set eth0 down" } else { "link set eth0 up" }),
            Cut::Sent => others.for_each(|other| away(node, other)),
            Cut::Received => others.for_each(|other| away(&self.nodes[other], number)),
        }
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for child in self.nodes.iter_mut().chain([&mut self.switch]) {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
