//! BSON, as far as GridFS needs it: writes documents, and reads documents with any content.
//!
//! A value that this driver does not use is kept as the bytes of the answer, so that the fields of other clients' files are
//! written back unchanged. The danger: a false length from a server or another client. No read passes the end of the answer.

use super::failure::Failure;

#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    Double(f64),
    Text(String),
    Document(Document),
    Array(Vec<Value>),
    Binary(Vec<u8>),
    Id(Id),
    Bool(bool),
    /// Milliseconds since 1970.
    Date(i64),
    Null,
    Int(i32),
    Long(i64),
    /// Any other kind: its number, and its bytes as received.
    Other(u8, Vec<u8>),
}

/// The standard's ObjectId. This driver makes it of the current second and random bytes.
pub type Id = [u8; 12];

#[derive(Debug, Clone, PartialEq, Default)]
pub struct Document(pub Vec<(String, Value)>);

/// `fields! { "name": value, … }`
macro_rules! fields {
    ($($name:literal: $value:expr),* $(,)?) => {
        $crate::gridfs::bson::Document(vec![$(($name.to_owned(), $crate::gridfs::bson::Value::from($value))),*])
    };
}
pub(super) use fields;

impl Document {
    pub fn get(&self, name: &str) -> Option<&Value> {
        self.0.iter().find(|(known, _)| known == name).map(|(_, value)| value)
    }

    pub fn text(&self, name: &str) -> Option<&str> {
        self.get(name).and_then(Value::as_text)
    }

    pub fn number(&self, name: &str) -> Option<i64> {
        self.get(name).and_then(Value::as_number)
    }

    pub fn document(&self, name: &str) -> Option<&Document> {
        match self.get(name) {
            Some(Value::Document(document)) => Some(document),
            _ => None,
        }
    }

    pub fn array(&self, name: &str) -> &[Value] {
        match self.get(name) {
            Some(Value::Array(values)) => values,
            _ => &[],
        }
    }

    pub fn take(&mut self, name: &str) -> Option<Value> {
        let at = self.0.iter().position(|(known, _)| known == name)?;
        Some(self.0.swap_remove(at).1)
    }

    /// Replaces the field in its place, or appends it.
    pub fn set(&mut self, name: &str, value: Value) {
        match self.0.iter_mut().find(|(known, _)| known == name) {
            Some((_, old)) => *old = value,
            None => self.0.push((name.to_owned(), value)),
        }
    }

    #[must_use]
    pub fn with(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.set(name, value.into());
        self
    }

    pub fn write(&self, out: &mut Vec<u8>) {
        let start = open(out);
        for (name, value) in &self.0 {
            element(out, name, value);
        }
        close(out, start);
    }

    /// Reads the document at the start of the bytes. Returns it and the bytes after it.
    pub fn read(bytes: &[u8]) -> Result<(Self, &[u8]), Failure> {
        let (fields, rest) = fields_of(bytes, &mut Budget::default())?;
        Ok((Self(fields), rest))
    }
}

impl Value {
    pub fn as_text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }

    /// A whole number of any numeric kind.
    pub fn as_number(&self) -> Option<i64> {
        match self {
            Self::Int(number) => Some((*number).into()),
            Self::Long(number) => Some(*number),
            Self::Double(number) if number.fract() == 0.0 && number.abs() < 9e15 => Some(*number as i64),
            _ => None,
        }
    }

    /// The kind and the bytes of the value, as in a document.
    pub fn bytes(&self) -> Vec<u8> {
        let mut out = vec![self.kind()];
        body(&mut out, self);
        out
    }

    /// The inverse of [`Self::bytes`].
    pub fn of_bytes(bytes: &[u8]) -> Result<Self, Failure> {
        let (kind, bytes) = bytes.split_first().ok_or_else(Failure::garbled)?;
        match value(*kind, bytes, &mut Budget::default())? {
            (value, []) => Ok(value),
            _ => Err(Failure::garbled()),
        }
    }

    fn kind(&self) -> u8 {
        match self {
            Self::Double(_) => 0x01,
            Self::Text(_) => 0x02,
            Self::Document(_) => 0x03,
            Self::Array(_) => 0x04,
            Self::Binary(_) => 0x05,
            Self::Id(_) => 0x07,
            Self::Bool(_) => 0x08,
            Self::Date(_) => 0x09,
            Self::Null => 0x0a,
            Self::Int(_) => 0x10,
            Self::Long(_) => 0x12,
            Self::Other(kind, _) => *kind,
        }
    }
}

macro_rules! from {
    ($($of:ty => $kind:ident),*) => {
        $(impl From<$of> for Value {
            fn from(value: $of) -> Self {
                Self::$kind(value.into())
            }
        })*
    };
}
from!(bool => Bool, i32 => Int, i64 => Long, &str => Text, String => Text, Document => Document, Id => Id, Vec<Value> => Array);

impl From<&Value> for Value {
    fn from(value: &Value) -> Self {
        value.clone()
    }
}

// ---- writing

fn open(out: &mut Vec<u8>) -> usize {
    out.extend_from_slice(&[0; 4]);
    out.len() - 4
}

fn close(out: &mut Vec<u8>, start: usize) {
    out.push(0);
    let length = length(out.len() - start);
    out[start..start + 4].copy_from_slice(&length);
}

/// (`wire` refuses messages that are too long for this.)
fn length(bytes: usize) -> [u8; 4] {
    i32::try_from(bytes).unwrap_or(i32::MAX).to_le_bytes()
}

fn element(out: &mut Vec<u8>, name: &str, value: &Value) {
    out.push(value.kind());
    out.extend_from_slice(name.as_bytes());
    out.push(0);
    body(out, value);
}

fn body(out: &mut Vec<u8>, value: &Value) {
    match value {
        Value::Double(number) => out.extend_from_slice(&number.to_le_bytes()),
        Value::Text(text) => {
            out.extend_from_slice(&length(text.len() + 1));
            out.extend_from_slice(text.as_bytes());
            out.push(0);
        }
        Value::Document(document) => document.write(out),
        Value::Array(values) => {
            let start = open(out);
            for (nth, value) in values.iter().enumerate() {
                element(out, &nth.to_string(), value);
            }
            close(out, start);
        }
        Value::Binary(bytes) => {
            out.extend_from_slice(&length(bytes.len()));
            out.push(0);
            out.extend_from_slice(bytes);
        }
        Value::Id(id) => out.extend_from_slice(id),
        Value::Bool(is) => out.push((*is).into()),
        Value::Date(number) | Value::Long(number) => out.extend_from_slice(&number.to_le_bytes()),
        Value::Null => {}
        Value::Int(number) => out.extend_from_slice(&number.to_le_bytes()),
        Value::Other(_, bytes) => out.extend_from_slice(bytes),
    }
}

// ---- reading

/// Servers refuse deeper documents.
const DEPTH_MAX: u32 = 200;
/// A field of two bytes in the answer takes a hundred times as many in memory. (The longest answer, 16 MiB, of a thousand files
/// with thousands of attributes has fewer.)
const FIELDS_MAX: u32 = 1 << 20;

fn take(bytes: &[u8], count: usize) -> Result<(&[u8], &[u8]), Failure> {
    bytes.split_at_checked(count).ok_or_else(Failure::garbled)
}

fn int(bytes: &[u8]) -> Result<(i32, &[u8]), Failure> {
    let (number, rest) = bytes.split_first_chunk::<4>().ok_or_else(Failure::garbled)?;
    Ok((i32::from_le_bytes(*number), rest))
}

fn size(bytes: &[u8]) -> Result<(usize, &[u8]), Failure> {
    let (number, rest) = int(bytes)?;
    Ok((usize::try_from(number).map_err(|_| Failure::garbled())?, rest))
}

fn long(bytes: &[u8]) -> Result<(i64, &[u8]), Failure> {
    let (number, rest) = bytes.split_first_chunk::<8>().ok_or_else(Failure::garbled)?;
    Ok((i64::from_le_bytes(*number), rest))
}

/// A name ends with a zero byte.
fn name(bytes: &[u8]) -> Result<(String, &[u8]), Failure> {
    let end = bytes.iter().position(|byte| *byte == 0).ok_or_else(Failure::garbled)?;
    Ok((String::from_utf8_lossy(&bytes[..end]).into_owned(), &bytes[end + 1..]))
}

type Fields = Vec<(String, Value)>;

/// The remaining limits of one answer.
struct Budget {
    depth: u32,
    fields: u32,
}

impl Default for Budget {
    fn default() -> Self {
        Self { depth: DEPTH_MAX, fields: FIELDS_MAX }
    }
}

fn fields_of<'a>(bytes: &'a [u8], budget: &mut Budget) -> Result<(Fields, &'a [u8]), Failure> {
    budget.depth = budget.depth.checked_sub(1).ok_or_else(Failure::garbled)?;
    let (whole, _) = size(bytes)?;
    let (own, rest) = take(bytes, whole)?;
    let mut left = own.get(4..).ok_or_else(Failure::garbled)?;
    let mut fields = Vec::new();
    loop {
        let (kind, after) = left.split_first().ok_or_else(Failure::garbled)?;
        if *kind == 0 {
            budget.depth += 1;
            return if after.is_empty() { Ok((fields, rest)) } else { Err(Failure::garbled()) };
        }
        let too_many = || Failure::ours(surgetank_types::error::Errno::IO, "the server's answer has too many fields");
        budget.fields = budget.fields.checked_sub(1).ok_or_else(too_many)?;
        let (name, after) = name(after)?;
        let (value, after) = value(*kind, after, budget)?;
        fields.push((name, value));
        left = after;
    }
}

fn value<'a>(kind: u8, bytes: &'a [u8], budget: &mut Budget) -> Result<(Value, &'a [u8]), Failure> {
    let other = |count: usize| -> Result<(Value, &'a [u8]), Failure> {
        let (own, rest) = take(bytes, count)?;
        Ok((Value::Other(kind, own.to_vec()), rest))
    };
    Ok(match kind {
        0x01 => {
            let (number, rest) = long(bytes)?;
            (Value::Double(f64::from_bits(number.cast_unsigned())), rest)
        }
        0x02 => {
            let (count, rest) = size(bytes)?;
            let (text, rest) = take(rest, count)?;
            match text.split_last() {
                Some((0, text)) => match std::str::from_utf8(text) {
                    Ok(text) => (Value::Text(text.to_owned()), rest),
                    Err(_) => other(4 + count)?,
                },
                _ => return Err(Failure::garbled()),
            }
        }
        0x03 => {
            let (fields, rest) = fields_of(bytes, budget)?;
            (Value::Document(Document(fields)), rest)
        }
        0x04 => {
            let (fields, rest) = fields_of(bytes, budget)?;
            (Value::Array(fields.into_iter().map(|(_, value)| value).collect()), rest)
        }
        0x05 => {
            let (count, rest) = size(bytes)?;
            let (subtype, rest) = rest.split_first().ok_or_else(Failure::garbled)?;
            let (own, rest) = take(rest, count)?;
            if *subtype == 0 { (Value::Binary(own.to_vec()), rest) } else { other(5 + count)? }
        }
        0x07 => {
            let (id, rest) = bytes.split_first_chunk::<12>().ok_or_else(Failure::garbled)?;
            (Value::Id(*id), rest)
        }
        0x08 => {
            let (is, rest) = take(bytes, 1)?;
            (Value::Bool(is != [0]), rest)
        }
        0x09 => {
            let (millis, rest) = long(bytes)?;
            (Value::Date(millis), rest)
        }
        0x0a => (Value::Null, bytes),
        0x10 => {
            let (number, rest) = int(bytes)?;
            (Value::Int(number), rest)
        }
        0x12 => {
            let (number, rest) = long(bytes)?;
            (Value::Long(number), rest)
        }
        // Undefined, and the least and the greatest key.
        0x06 | 0x7f | 0xff => other(0)?,
        // A regular expression: two texts.
        0x0b => {
            let after = name(name(bytes)?.1)?.1;
            other(bytes.len() - after.len())?
        }
        // A pointer: a text and an id. Code, or a symbol: a text. Code with variables: its length counts itself.
        0x0c => other(size(bytes)?.0.saturating_add(16))?,
        0x0d | 0x0e => other(size(bytes)?.0.saturating_add(4))?,
        0x0f => other(size(bytes)?.0.max(4))?,
        // A timestamp of the log, a decimal number.
        0x11 => other(8)?,
        0x13 => other(16)?,
        _ => return Err(Failure::garbled()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all_kinds() -> Document {
        fields! {
            "double": Value::Double(1.5), "text": "ü", "document": fields! { "a": 1 }, "array": vec![Value::Int(1), Value::Null],
            "binary": Value::Binary(vec![1, 2, 3]), "id": [7_u8; 12], "bool": true, "date": Value::Date(-5),
            "null": Value::Null, "int": -3, "long": 1_i64 << 40, "uuid": Value::Other(5, [&[16, 0, 0, 0, 4][..], &[9; 16]].concat()),
            "regex": Value::Other(0x0b, b"a.*\0i\0".to_vec()), "code": Value::Other(0x0d, b"\x02\0\0\0x\0".to_vec()),
            "scoped": Value::Other(0x0f, b"\x06\0\0\0xx".to_vec()), "pointer": Value::Other(0x0c, [&b"\x02\0\0\0x\0"[..], &[1; 12]].concat()),
            "stamp": Value::Other(0x11, vec![1; 8]), "decimal": Value::Other(0x13, vec![2; 16]), "max": Value::Other(0x7f, vec![]),
            "text that is none": Value::Other(0x02, b"\x02\0\0\0\xff\0".to_vec()),
        }
    }

    #[test]
    fn written_document_is_read_back() {
        let document = all_kinds();
        let mut bytes = Vec::new();
        document.write(&mut bytes);
        let whole = bytes.len();
        bytes.extend_from_slice(b"more");
        let (read, rest) = Document::read(&bytes).unwrap();
        assert_eq!((&read, rest), (&document, &b"more"[..]));
        for (name, value) in &document.0 {
            assert_eq!(&Value::of_bytes(&value.bytes()).unwrap(), value, "{name}");
        }
        // {"hello": "world"}, from the page of the standard.
        let known = b"\x16\0\0\0\x02hello\0\x06\0\0\0world\0\0";
        assert_eq!(Document::read(known).unwrap().0, fields! { "hello": "world" });
        for end in 0..whole {
            assert!(Document::read(&bytes[..end]).is_err(), "the first {end} bytes of it");
        }
    }

    #[test]
    fn damaged_document_is_read_or_refused() {
        let mut bytes = Vec::new();
        all_kinds().write(&mut bytes);
        for at in 0..bytes.len() {
            for bit in 0..8 {
                bytes[at] ^= 1 << bit;
                let _ = Document::read(&bytes);
                bytes[at] ^= 1 << bit;
            }
        }
        let mut deep = fields! {};
        for _ in 0..300 {
            deep = fields! { "d": deep };
        }
        let mut bytes = Vec::new();
        deep.write(&mut bytes);
        assert!(Document::read(&bytes).is_err());
    }
}
