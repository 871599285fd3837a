//! The end of a Slurm job, as `squeue` reports it. The danger that it avoids: a Slurm controller that does not answer and
//! delays the start.

use std::io::Read;
use std::process::{Command, Stdio};
use std::time::Duration;

use super::deadline::Deadline;

const TIMEOUT: Duration = Duration::from_secs(5);
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// The end of the job; `None` if it is unknown or the job has no limit.
pub fn end_of(job: &str) -> Option<Deadline> {
    if job.is_empty() || !job.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let mut squeue = Command::new("squeue")
        .args(["--noheader", "--format=%e", "--jobs", job])
        .env("SLURM_TIME_FORMAT", "%s")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .ok()?;
    let began = surgetank_types::clock::tick();
    loop {
        match squeue.try_wait() {
            Ok(Some(status)) if status.success() => break,
            Ok(None) if began.elapsed() < TIMEOUT => std::thread::sleep(LOOK_EVERY),
            _ => {
                let _ = squeue.kill();
                let _ = squeue.wait();
                return None;
            }
        }
    }
    let mut output = String::new();
    squeue.stdout.take()?.read_to_string(&mut output).ok()?;
    let now = surgetank_types::clock::now().secs();
    let seconds: i64 = output.trim().parse().ok()?;
    (seconds > now).then(|| Deadline::new(seconds, "squeue", now))
}
