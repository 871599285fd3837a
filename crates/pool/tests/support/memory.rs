//! A key-value server in memory. It can lose its last writes, as one that fails over.

use std::collections::BTreeMap;

use surgetank_pool::remote::exchange::{Exchange, Exchanged, Key, Read, Write};

#[derive(Default)]
pub struct Memory {
    pub rows: BTreeMap<Key, Vec<u8>>,
    /// What each exchange replaced.
    undo: Vec<Vec<(Key, Option<Vec<u8>>)>>,
    server: u64,
}

impl Memory {
    /// `None`: the server is another one than the exchange wants.
    pub fn exchange(&mut self, exchange: &Exchange) -> Option<Exchanged> {
        let server = self.server.to_be_bytes().to_vec();
        if exchange.only_at.as_ref().is_some_and(|wanted| *wanted != server) {
            return None;
        }
        let done = exchange.guards.iter().all(|(key, value)| self.rows.get(key) == value.as_ref());
        if done && !exchange.writes.is_empty() {
            let mut undo = Vec::new();
            for write in &exchange.writes {
                match write {
                    Write::Put(key, value) => undo.push((key.clone(), self.rows.insert(key.clone(), value.clone()))),
                    Write::Delete(key) => undo.push((key.clone(), self.rows.remove(key))),
                    Write::DeleteRange(from, to) => {
                        let keys: Vec<Key> =
                            self.rows.range(from.clone()..to.clone()).map(|(k, _)| k.clone()).collect();
                        undo.extend(keys.into_iter().map(|key| (key.clone(), self.rows.remove(&key))));
                    }
                }
            }
            let mut keys: Vec<&Key> = exchange
                .writes
                .iter()
                .filter_map(|write| match write {
                    Write::Put(key, _) | Write::Delete(key) => Some(key),
                    Write::DeleteRange(..) => None,
                })
                .collect();
            keys.sort();
            assert!(keys.windows(2).all(|two| two[0] != two[1]), "a key is written twice: {exchange:?}");
            self.undo.push(undo);
        }
        let mut rows = BTreeMap::new();
        for read in &exchange.reads {
            match read {
                Read::Key(key) => rows.extend(self.rows.get_key_value(key).map(|(k, v)| (k.clone(), v.clone()))),
                Read::Range(from, to) => {
                    rows.extend(self.rows.range(from.clone()..to.clone()).map(|(k, v)| (k.clone(), v.clone())));
                }
            }
        }
        Some(Exchanged { done, rows, server, has_replicas: false, is_confirmed: false })
    }

    /// Another server continues, without the last writes.
    pub fn fail_over(&mut self, lost: usize) {
        self.server += 1;
        for _ in 0..lost {
            let Some(undo) = self.undo.pop() else { break };
            for (key, value) in undo.into_iter().rev() {
                match value {
                    Some(value) => drop(self.rows.insert(key, value)),
                    None => drop(self.rows.remove(&key)),
                }
            }
        }
    }

    #[allow(dead_code)] // only the model loses some
    /// How many exchanges have written.
    pub fn written(&self) -> usize {
        self.undo.len()
    }
}
