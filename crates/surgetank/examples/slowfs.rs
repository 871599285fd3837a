//! A slow store for the testbed: shows SOURCE at MOUNTPOINT, with a delay before each metadata operation. A file
//! beside it lists faults to inject (`crates/surgetank/tests/mirror/faults.rs`). Runs in the foreground; unmounts and
//! ends on SIGTERM or SIGINT.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use surgetank::mount::namespaces::{private_namespace_root, private_namespace_user};

#[path = "../tests/mirror/mod.rs"]
mod mirror;

use mirror::{MirrorOptions, serve_mirror};

#[derive(Parser)]
struct Arguments {
    source: PathBuf,
    mountpoint: PathBuf,
    /// Delay before each metadata operation, in microseconds (500 is a busy parallel file system).
    #[arg(long, default_value_t = 0)]
    latency_us: u64,
    /// Let the kernel read and write the files itself.
    #[arg(long)]
    passthrough: bool,
    /// Let the close of a writer wait until its data is on the device, as over NFS.
    #[arg(long)]
    flush_on_close: bool,
    /// How long the kernel may cache names and attributes, in milliseconds; 0 when SOURCE changes outside the mount.
    #[arg(long, default_value_t = 1000)]
    ttl_ms: u64,
    /// A file of faults, which is read before each operation.
    #[arg(long, value_name = "FILE")]
    faults: Option<PathBuf>,
    /// Mount in a namespace of its own, where only processes that enter it see it; needs no privilege.
    #[arg(long)]
    private: bool,
}

fn go_private() -> std::io::Result<()> {
    if rustix::process::geteuid().is_root() { private_namespace_root() } else { private_namespace_user() }
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if arguments.private
        && let Err(error) = go_private()
    {
        eprintln!("slowfs: no private namespace: {error}");
        return ExitCode::FAILURE;
    }
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let options = MirrorOptions {
        latency_metadata: Duration::from_micros(arguments.latency_us),
        passthrough: arguments.passthrough,
        ttl: Duration::from_millis(arguments.ttl_ms),
        flush_on_close: arguments.flush_on_close,
    };
    match serve_mirror(&arguments.source, &arguments.mountpoint, options, arguments.faults) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("slowfs: {error}");
            ExitCode::FAILURE
        }
    }
}
