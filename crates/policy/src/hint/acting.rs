//! The hints of a file that are asked at operations on it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use surgetank_types::sync::Arc;

/// By name.
type Values = BTreeMap<Box<str>, Box<str>>;

/// Hints that are asked at operations, with their values. ([`crate::hint::acts`] asks them.) It allocates nothing as long as there
/// are none.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(from = "Values", into = "Values")]
pub struct Acting(Option<Arc<Values>>);

impl Acting {
    /// Are there none?
    pub fn is_empty(&self) -> bool {
        self.0.is_none()
    }

    /// Sets one. The value has been checked.
    pub(crate) fn set(&mut self, name: &str, value: &str) {
        Arc::make_mut(self.0.get_or_insert_with(Arc::default)).insert(name.into(), value.into());
    }

    /// Takes from `weaker` what is not set here.
    pub fn or(&mut self, weaker: &Self) {
        if self.is_empty() {
            self.clone_from(weaker);
            return;
        }
        for (name, value) in weaker.iter() {
            if self.value(name).is_none() {
                self.set(name, value);
            }
        }
    }

    /// All of them, with their values.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().flat_map(|values| values.iter()).map(|(name, value)| (name.as_ref(), value.as_ref()))
    }

    fn value(&self, name: &str) -> Option<&str> {
        self.0.as_ref().and_then(|values| values.get(name)).map(AsRef::as_ref)
    }

    pub(crate) fn shares_with(&self, other: &Self) -> bool {
        self.iter().any(|(name, _)| other.value(name).is_some())
    }

    pub(crate) fn agrees_with(&self, other: &Self, which: &Self) -> bool {
        which.iter().all(|(name, _)| self.value(name) == other.value(name))
    }
}

impl From<Acting> for Values {
    fn from(acting: Acting) -> Self {
        acting.0.map(Arc::unwrap_or_clone).unwrap_or_default()
    }
}

impl From<Values> for Acting {
    fn from(values: Values) -> Self {
        Self((!values.is_empty()).then(|| Arc::new(values)))
    }
}
