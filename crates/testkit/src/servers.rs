//! Real servers, each started by a test on a temporary directory and a free port of this machine. Without the program, and not
//! under CI, `start` gives `None`.

mod certificate;
pub mod hdfs;
pub mod mongo;
pub mod moosefs;
pub mod redis;
pub mod s3;
