//! Real servers. A test starts each on a temporary directory and a free port of this machine. If the program is not installed,
//! `start` returns `None`; under CI it panics.

mod certificate;
pub mod hdfs;
pub mod mongo;
pub mod moosefs;
pub mod redis;
pub mod s3;
