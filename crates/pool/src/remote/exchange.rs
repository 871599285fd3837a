//! What a key-value server does for the registry: one guarded transaction, and no more.
//!
//! An exchange is carried out whole or not at all. If all guards hold, its writes are made. What it reads is of the moment
//! after that. If a guard does not hold, nothing is written, and what it reads is of that moment.
//!
//! The danger that this avoids: rules that hold with one server only.

use std::collections::BTreeMap;
use std::io;

/// A key of the pool. The server puts the pool's name before it.
pub type Key = Vec<u8>;

/// One transaction.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Exchange {
    /// Keys that must have this value; `None`: that must be absent.
    pub guards: Vec<(Key, Option<Vec<u8>>)>,
    /// What is written, in order. No key is in two of them.
    pub writes: Vec<Write>,
    /// What is read.
    pub reads: Vec<Read>,
    /// Only if the server is still this one: its identity is looked up again.
    pub only_at: Option<Vec<u8>>,
    /// The writes have to be at a replica, too.
    pub confirm: bool,
}

/// One write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Write {
    /// Sets the value.
    Put(Key, Vec<u8>),
    /// The key is absent then.
    Delete(Key),
    /// All keys from the first to before the second are absent then.
    DeleteRange(Key, Key),
}

/// What is read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Read {
    /// One key.
    Key(Key),
    /// All keys from the first to before the second.
    Range(Key, Key),
}

/// What became of an exchange.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Exchanged {
    /// The guards held, and the writes are made.
    pub done: bool,
    /// What was read.
    pub rows: BTreeMap<Key, Vec<u8>>,
    /// Which history the server's data has. It is another one after each start and each fail-over that may lose writes.
    pub server: Vec<u8>,
    /// The server has replicas.
    pub has_replicas: bool,
    /// A replica has the writes. (Only if the exchange asked for that.)
    pub is_confirmed: bool,
}

/// A connection to a key-value server.
pub trait Server: Send {
    /// Carries out an exchange. Blocks for a bounded time.
    ///
    /// Errors: whether it was carried out is unknown, and it may still be carried out later. The next call connects again.
    fn exchange(&mut self, exchange: &Exchange) -> io::Result<Exchanged>;

    /// So many writes fit into one exchange.
    fn writes_max(&self) -> usize;
}
