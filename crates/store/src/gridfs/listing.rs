//! Listings, in the byte order of the names, as in the index. Of several versions the newest is shown. A directory that
//! continues after a page is skipped.
//!
//! The danger that this avoids: a document that is not a file's (other clients may put anything there) ends a listing. It is
//! skipped.

use super::bson::{Document, fields};
use super::failure::Failure;
use super::files::File;
use super::server::{Kind, Server};
use crate::object::Page;

/// The number of files in one request, and the largest number in a page.
const PAGE: usize = 1000;

/// The longest name in a path; longer ones are not shown.
const NAME_BYTES_MAX: usize = 255;

/// Where a listing continues: after this name, or with it.
enum From {
    Behind(String),
    With(String),
}

impl From {
    fn parse(text: &str) -> Result<Self, Failure> {
        match (text.strip_prefix('>'), text.strip_prefix('=')) {
            (Some(name), _) => Ok(Self::Behind(name.to_owned())),
            (_, Some(name)) => Ok(Self::With(name.to_owned())),
            _ => Err(Failure::ours(surgetank_types::error::Errno::INVAL, "the position in the listing is malformed")),
        }
    }

    fn text(&self) -> String {
        match self {
            Self::Behind(name) => format!(">{name}"),
            Self::With(name) => format!("={name}"),
        }
    }

    fn after(listed: &Listed) -> Self {
        match listed {
            Listed::File(name) => Self::Behind(name.clone()),
            // `0` follows `/`. (Only the last `/` is replaced: after `a//` come the other names in `a/`.)
            Listed::Group(group) => Self::With(format!("{}0", group.strip_suffix('/').unwrap_or(group))),
        }
    }
}

#[derive(PartialEq)]
enum Listed {
    File(String),
    Group(String),
}

pub fn behind(key: &str) -> String {
    From::Behind(key.to_owned()).text()
}

impl Server {
    pub fn page(&self, prefix: &str, delimited: bool, from: Option<&str>) -> Result<Page, Failure> {
        let mut from = from.map_or_else(|| Ok(From::With(prefix.to_owned())), From::parse)?;
        let (mut page, mut last, mut skip) = (Page::default(), None, 0);
        loop {
            let range = match &from {
                From::Behind(name) => fields! { "$gt": self.filename(name) },
                From::With(name) => fields! { "$gte": self.filename(name) },
            };
            let sort = fields! { "filename": 1, "uploadDate": -1, "_id": -1 };
            let limit = i32::try_from(PAGE).ok();
            let filter = fields! { "filename": range };
            let found = self.find_behind(Kind::Files, filter, Some(sort), (skip, limit), None)?;
            let mut is_further = false;
            for document in &found {
                let Some(name) = document.text("filename") else { continue };
                let name = name.strip_prefix(&self.place.prefix);
                let Some((key, rest)) = name.and_then(|key| Some((key, key.strip_prefix(prefix)?))) else {
                    return Ok(page);
                };
                is_further = true;
                let group = rest.find('/').filter(|_| delimited).map(|slash| &key[..=prefix.len() + slash]);
                let listed =
                    group.map_or_else(|| Listed::File(key.to_owned()), |group| Listed::Group(group.to_owned()));
                if last.as_ref() == Some(&listed) {
                    continue;
                }
                if page.objects.len() + page.prefixes.len() >= PAGE {
                    page.next = last.as_ref().map(|last| From::after(last).text());
                    return Ok(page);
                }
                match &listed {
                    Listed::Group(group) => page.prefixes.push(group.clone()),
                    Listed::File(_) => {
                        page.objects.extend(File::of(document).and_then(|file| file.object(&self.place.prefix)));
                    }
                }
                last = Some(listed);
            }
            match &last {
                _ if found.len() < PAGE => return Ok(page),
                Some(last) if is_further => (from, skip) = (From::after(last), 0),
                // The page has only documents without a name.
                _ => skip += found.len(),
            }
        }
    }

    /// The first file below the prefix, or perhaps below it, that has no valid path.
    pub fn hidden(&self) -> Result<Option<String>, Failure> {
        let fields = fields! { "filename": 1, "length": 1, "chunkSize": 1 };
        let strange = |document: Document| -> Option<String> {
            let Some(filename) = document.text("filename") else {
                return Some(format!("the file with the id {:?}, whose name is not text", document.get("_id")));
            };
            let key = filename.strip_prefix(&self.place.prefix)?;
            let path = key.strip_suffix('/').unwrap_or(key);
            let is_path = !path.split('/').any(|name| matches!(name, "" | "." | "..") || name.len() > NAME_BYTES_MAX);
            (!is_path || File::of(&document).is_none()).then(|| filename.to_owned())
        };
        Ok(self.find_some(Kind::Files, fields, &strange)?.into_iter().next())
    }
}
