//! Listings, in the order of the names' bytes, as the index has them. Of several versions the newest is shown. A directory
//! that goes on behind a page is stepped over.

use super::bson::fields;
use super::failure::Failure;
use super::files::File;
use super::server::{Kind, Server};
use crate::store::object::Page;

/// Files that are looked at together, and the most that a page shows.
const PAGE: usize = 1000;

/// Where a listing goes on: behind this name, or with it.
enum From {
    Behind(String),
    With(String),
}

impl From {
    fn parse(text: &str) -> Result<Self, Failure> {
        match (text.strip_prefix('>'), text.strip_prefix('=')) {
            (Some(name), _) => Ok(Self::Behind(name.to_owned())),
            (_, Some(name)) => Ok(Self::With(name.to_owned())),
            _ => Err(Failure::ours(crate::error::Errno::INVAL, "no listing goes on there")),
        }
    }

    fn text(&self) -> String {
        match self {
            Self::Behind(name) => format!(">{name}"),
            Self::With(name) => format!("={name}"),
        }
    }

    fn after(shown: &Shown) -> Self {
        match shown {
            Shown::File(name) => Self::Behind(name.clone()),
            // `/` is followed by `0`.
            Shown::Group(group) => Self::With(format!("{}0", group.trim_end_matches('/'))),
        }
    }
}

#[derive(PartialEq)]
enum Shown {
    File(String),
    Group(String),
}

pub fn behind(key: &str) -> String {
    From::Behind(key.to_owned()).text()
}

impl Server {
    pub fn page(&self, prefix: &str, delimited: bool, from: Option<&str>) -> Result<Page, Failure> {
        let mut from = from.map_or_else(|| Ok(From::With(prefix.to_owned())), From::parse)?;
        let (mut page, mut last) = (Page::default(), None);
        loop {
            let range = match &from {
                From::Behind(name) => fields! { "$gt": self.filename(name) },
                From::With(name) => fields! { "$gte": self.filename(name) },
            };
            let sort = fields! { "filename": 1, "uploadDate": -1, "_id": -1 };
            let limit = i32::try_from(PAGE).ok();
            let found = self.find(Kind::Files, fields! { "filename": range }, Some(sort), limit)?;
            for document in &found {
                let name = document.text("filename").and_then(|name| name.strip_prefix(&self.place.prefix));
                let Some((key, rest)) = name.and_then(|key| Some((key, key.strip_prefix(prefix)?))) else {
                    return Ok(page);
                };
                let group = rest.find('/').filter(|_| delimited).map(|slash| &key[..=prefix.len() + slash]);
                let shown = group.map_or_else(|| Shown::File(key.to_owned()), |group| Shown::Group(group.to_owned()));
                if last.as_ref() == Some(&shown) {
                    continue;
                }
                if page.objects.len() + page.prefixes.len() >= PAGE {
                    page.next = last.as_ref().map(|last| From::after(last).text());
                    return Ok(page);
                }
                match &shown {
                    Shown::Group(group) => page.prefixes.push(group.clone()),
                    Shown::File(_) => {
                        page.objects.extend(File::of(document).and_then(|file| file.object(&self.place.prefix)));
                    }
                }
                last = Some(shown);
            }
            match &last {
                Some(last) if found.len() == PAGE => from = From::after(last),
                _ => return Ok(page),
            }
        }
    }
}
