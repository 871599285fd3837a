//! Credentials and signatures: the chain of sources of all AWS tools (environment, profile, SSO, web identity, process,
//! container, instance); both by `reqsign`, driven without an asynchronous runtime.
//!
//! The danger that it avoids: a secret in a message. Nothing here is printed: failures become fixed sentences, because the
//! library's own may contain parts of answers.

use std::io::Read;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{PoisonError, RwLock};
use std::time::Duration;

use bytes::Bytes;
use reqsign_aws_v4::{Credential, DefaultCredentialProvider, ProfileCredentialProvider, RequestSigner};
use reqsign_core::{
    CommandExecute, CommandOutput, Context, Error, FileRead, HttpSend, OsEnv, ProvideCredentialChain, Result, Signer,
};
use ureq::http::{Request, Response, request::Parts};

use super::failure::Failure;
use super::place::Place;
use surgetank_types::error::Errno;

pub struct Credentials {
    signer: RwLock<Signer<Credential>>,
    chain: Box<dyn Fn() -> DefaultCredentialProvider + Send + Sync>,
    /// Credentials existed before: they are not missing, but cannot be renewed.
    had: AtomicBool,
}

impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Credentials")
    }
}

impl Credentials {
    pub fn new(place: &Place) -> Self {
        let context = Context::new()
            .with_file_read(Files)
            .with_http_send(Http::new())
            .with_env(OsEnv)
            .with_command_execute(Commands);
        let chain = chain(place);
        let signer = Signer::new(context, chain(), RequestSigner::new("s3", &place.region));
        Self { signer: RwLock::new(signer), chain: Box::new(chain), had: false.into() }
    }

    /// Adds the signature to the request.
    pub fn sign(&self, request: &mut Parts) -> std::result::Result<(), Failure> {
        // Cheap: the signer is a handle on shared state.
        let signer = self.signer.read().unwrap_or_else(PoisonError::into_inner).clone();
        match pollster::block_on(signer.sign(request, None)) {
            Ok(()) => {
                self.had.store(true, Ordering::Relaxed);
                Ok(())
            }
            Err(_) if self.had.load(Ordering::Relaxed) => {
                Err(Failure::ours(Errno::KEYEXPIRED, "the credentials have expired and could not be renewed"))
            }
            Err(_) => Err(Failure::ours(
                Errno::ACCESS,
                "no credentials were found: neither in the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY), nor in a \
                 profile (~/.aws/credentials), nor from a role of this instance",
            )),
        }
    }

    /// The credentials have expired by the server's answer: the next request asks the sources again.
    pub fn forget(&self) {
        let mut signer = self.signer.write().unwrap_or_else(PoisonError::into_inner);
        *signer = signer.clone().with_credential_provider((self.chain)());
    }
}

fn chain(place: &Place) -> impl Fn() -> DefaultCredentialProvider + Send + Sync + use<> {
    let (profile, file) = (place.profile.clone(), place.credentials_file.clone());
    move || match (&file, &profile) {
        (Some(file), _) => {
            let only = ProfileCredentialProvider::new().with_credentials_file(file.to_string_lossy());
            let only = only.with_profile(profile.as_deref().unwrap_or("default"));
            DefaultCredentialProvider::with_chain(ProvideCredentialChain::new().push(only))
        }
        (None, Some(name)) => DefaultCredentialProvider::builder().with_profile(name).build(),
        (None, None) => DefaultCredentialProvider::new(),
    }
}

// ---- the library's access to files, commands and HTTP, blocking: a thread that waits for credentials has nothing else to do

#[derive(Debug)]
struct Files;

impl FileRead for Files {
    async fn file_read(&self, path: &str) -> Result<Vec<u8>> {
        std::fs::read(path).map_err(|why| Error::config_invalid("a file could not be read").with_source(why))
    }
}

#[derive(Debug)]
struct Commands;

impl CommandExecute for Commands {
    async fn command_execute<'a>(&'a self, program: &'a str, words: &'a [&'a str]) -> Result<CommandOutput> {
        let output = std::process::Command::new(program).args(words).stdin(std::process::Stdio::null()).output();
        let output = output.map_err(|why| Error::config_invalid("a command could not be run").with_source(why))?;
        Ok(CommandOutput { status: output.status.code().unwrap_or(-1), stdout: output.stdout, stderr: output.stderr })
    }
}

/// A separate HTTP client: the addresses of instance roles answer at once or not at all, and are never behind a proxy.
#[derive(Debug)]
struct Http(ureq::Agent, ureq::Agent);

impl Http {
    fn new() -> Self {
        let with = |near: bool| {
            let mut config = ureq::Agent::config_builder()
                .http_status_as_error(false)
                .timeout_connect(Some(Duration::from_secs(if near { 1 } else { 5 })))
                .timeout_global(Some(Duration::from_secs(if near { 3 } else { 20 })));
            if near {
                config = config.proxy(None);
            }
            config.build().new_agent()
        };
        Self(with(true), with(false))
    }
}

impl HttpSend for Http {
    async fn http_send(&self, request: Request<Bytes>) -> Result<Response<Bytes>> {
        let near = request.uri().scheme_str() == Some("http");
        let agent = if near { &self.0 } else { &self.1 };
        let (parts, body) = request.into_parts();
        let failed = |why: ureq::Error| Error::unexpected("no answer").with_source(why);
        let answer = agent.run(Request::from_parts(parts, body.as_ref())).map_err(failed)?;
        let (parts, body) = answer.into_parts();
        let mut bytes = Vec::new();
        let read = body.into_reader().take(1 << 20).read_to_end(&mut bytes);
        read.map_err(|why| Error::unexpected("half an answer").with_source(why))?;
        Ok(Response::from_parts(parts, Bytes::from(bytes)))
    }
}
