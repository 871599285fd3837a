//! The place of the files that a server's URL means, without the rest of the URL: limits, credentials, how the server is
//! reached.
//!
//! The danger that it avoids: two URLs of one store that are taken for two stores, so that files for it are never drained.

use surgetank_types::error::{Error, Result};

/// One name for each server that may answer; URLs with a name in common mean the same store. Errors: a URL that is not
/// understood.
pub fn sites(url: &str) -> Result<Vec<String>> {
    match url.split_once("://").map(|(scheme, _)| scheme) {
        #[cfg(feature = "s3")]
        Some("s3") => {
            let place = super::s3::Place::parse(url)?;
            Ok(vec![format!("{place} at {}", place.endpoint)])
        }
        #[cfg(feature = "gridfs")]
        Some("mongodb") => Ok(vec![super::gridfs::Place::parse(url)?.to_string()]),
        #[cfg(feature = "redis")]
        Some("redis" | "rediss") => {
            let place = super::redis::Place::parse(url)?;
            let site = |node: &super::redis::Node| {
                format!("redis {} {} db {} prefix {}", node.host, node.port, place.db, place.prefix)
            };
            Ok(place.nodes.iter().map(site).collect())
        }
        #[cfg(feature = "webhdfs")]
        Some("webhdfs") => {
            let place = super::webhdfs::Place::parse(url)?;
            Ok(vec![format!("webhdfs {}{}", place.endpoint, place.root)])
        }
        _ => Err(Error::new(format!("the store {url} cannot be used")).why("this kind of store is not in this build")),
    }
}

#[cfg(test)]
mod tests {
    #[cfg(any(feature = "redis", feature = "s3", feature = "webhdfs"))]
    fn are_one(one: &str, other: &str) -> bool {
        let other = super::sites(other).unwrap();
        super::sites(one).unwrap().iter().any(|site| other.contains(site))
    }

    #[cfg(feature = "s3")]
    #[test]
    fn s3_site_is_endpoint_bucket_and_prefix() {
        let url = "s3://b/p?endpoint=http://h:1";
        assert!(are_one(url, "s3://b/p/?endpoint=http://h:1&region=far"));
        assert!(!are_one(url, "s3://b/q?endpoint=http://h:1"));
        assert!(!are_one(url, "s3://b/p?endpoint=http://h:2"));
    }

    #[cfg(feature = "redis")]
    #[test]
    fn redis_sites_are_its_nodes_with_prefix() {
        let url = "redis://a:1,b:2/0?prefix=p";
        assert!(are_one(url, "redis://b:2,c:3/0?prefix=p"));
        assert!(!are_one(url, "redis://a:1/0?prefix=q") && !are_one(url, "redis://c:3/0?prefix=p"));
    }

    #[cfg(feature = "webhdfs")]
    #[test]
    fn hdfs_site_is_independent_of_the_user() {
        assert!(are_one("webhdfs://ann@h:1/p", "webhdfs://bob@h:1/p"));
        assert!(!are_one("webhdfs://ann@h:1/p", "webhdfs://ann@h:1/q"));
    }
}
