//! What can be asked.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::de::DeserializeOwned;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::stages::Client;
use crate::capture::Mapping;
use crate::image::{Format, LayerSpec, Owner, UpperSpec, ZFileSpec};
use crate::{Code, Error};

/// How an image is served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Target {
    /// ublk where it works, else FUSE.
    #[default]
    Auto,
    /// A file of the mount.
    Fuse,
    /// A block device.
    Ublk,
}

/// No arguments.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Nothing {}

/// The name of an image.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Named {
    pub image: String,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Attach {
    pub image: String,
    pub layers: Vec<LayerSpec>,
    #[serde(default)]
    pub upper: Option<UpperSpec>,
    #[serde(default)]
    pub size: Option<u64>,
    #[serde(default)]
    pub target: Target,
    #[serde(default)]
    pub record: bool,
    #[serde(default)]
    pub owner: Owner,
    /// Everybody may read it.
    #[serde(default)]
    pub shared: bool,
    /// It gets its layers later.
    #[serde(default)]
    pub blank: bool,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bind {
    pub image: String,
    pub layers: Vec<LayerSpec>,
    /// What its size must be.
    #[serde(default)]
    pub size: Option<u64>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Detach {
    pub image: String,
    #[serde(default)]
    pub discard_upper: bool,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Seal {
    pub image: String,
    pub layer: PathBuf,
    #[serde(default)]
    pub digest: bool,
    /// Reply only when the layer is on stable storage. A digest implies it.
    #[serde(default)]
    pub durable: bool,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Compact {
    #[serde(default)]
    pub layers: Option<Vec<LayerSpec>>,
    /// Nothing lies beneath `layers`, so zeroes need no entry.
    #[serde(default)]
    pub base: bool,
    #[serde(default)]
    pub image: Option<String>,
    #[serde(default)]
    pub from: Option<usize>,
    #[serde(default)]
    pub to: Option<usize>,
    pub output: PathBuf,
    #[serde(default)]
    pub zfile: Option<ZFileSpec>,
    #[serde(default)]
    pub digest: bool,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Import {
    pub input: PathBuf,
    pub output: PathBuf,
    #[serde(default)]
    pub zfile: Option<ZFileSpec>,
    #[serde(default)]
    pub digest: bool,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Export {
    #[serde(default)]
    pub image: Option<String>,
    #[serde(default)]
    pub layers: Option<Vec<LayerSpec>>,
    pub output: PathBuf,
    pub format: Format,
    #[serde(default)]
    pub zfile: Option<ZFileSpec>,
    #[serde(default)]
    pub digest: bool,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Capture {
    pub pid: u32,
    #[serde(default)]
    pub start_time: Option<u64>,
    pub mappings: Vec<Mapping>,
    #[serde(default)]
    pub base: Vec<LayerSpec>,
    /// How many of `base`, from the lowest, the guest maps; the others were captured from it since.
    #[serde(default)]
    pub mapped: Option<usize>,
    pub output: PathBuf,
    pub size: u64,
    #[serde(default = "yes")]
    pub compare: bool,
    #[serde(default)]
    pub digest: bool,
    #[serde(default)]
    pub durable: bool,
    /// Tells the client when to stop the guest and when it may go on.
    #[serde(default)]
    pub staged: Option<Stage>,
    /// Who is told, if so.
    #[serde(skip)]
    pub client: Option<Client>,
}

/// What a capture in stages does while the guest stands still.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// Everything but finishing the file.
    Write,
    /// Copying only, as far as there is room for copies.
    Copy,
}

/// The answer to a capture that is ready.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Proceed {
    /// The id of the capture's request.
    pub capture: Value,
    #[serde(default)]
    pub abandon: bool,
}

fn yes() -> bool {
    true
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SaveWorkingSet {
    pub image: String,
    pub output: PathBuf,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Prefetch {
    pub image: String,
    pub working_set: PathBuf,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Restore {
    pub pid: u32,
    #[serde(default)]
    pub start_time: Option<u64>,
    pub mappings: Vec<Mapping>,
    pub layers: Vec<LayerSpec>,
    pub size: u64,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Credentials {
    pub url: String,
    #[serde(default)]
    pub headers: BTreeMap<String, String>,
}

/// One request.
#[derive(Debug)]
#[allow(missing_docs, reason = "each is the operation of that name in the protocol's document")]
pub enum Op {
    Version,
    Attach(Attach),
    Bind(Bind),
    Detach(Detach),
    Seal(Seal),
    Compact(Compact),
    Import(Import),
    Export(Export),
    Capture(Box<Capture>),
    Proceed(Proceed),
    WorkingSet(SaveWorkingSet),
    Prefetch(Prefetch),
    Restore(Restore),
    Stat(Named),
    List,
    CacheStat,
    Credentials(Credentials),
    Subscribe,
}

impl Op {
    /// Takes `op` and its arguments.
    ///
    /// # Errors
    /// [`Code::Invalid`] or, for an operation that is not known, [`Code::Unsupported`].
    pub fn parse(mut request: Map<String, Value>) -> Result<Self, Error> {
        let name = match request.remove("op") {
            Some(Value::String(name)) => name,
            _ => return Err(Error::invalid("a request needs \"op\", a string")),
        };
        let args = Value::Object(request);
        Ok(match name.as_str() {
            "version" => parse::<Nothing>(&name, args).map(|_| Self::Version)?,
            "attach" => Self::Attach(parse(&name, args)?),
            "bind" => Self::Bind(parse(&name, args)?),
            "detach" => Self::Detach(parse(&name, args)?),
            "seal" => Self::Seal(parse(&name, args)?),
            "compact" => Self::Compact(parse(&name, args)?),
            "import" => Self::Import(parse(&name, args)?),
            "export" => Self::Export(parse(&name, args)?),
            "capture" => Self::Capture(parse(&name, args)?),
            "proceed" => Self::Proceed(parse(&name, args)?),
            "working_set" => Self::WorkingSet(parse(&name, args)?),
            "prefetch" => Self::Prefetch(parse(&name, args)?),
            "restore" => Self::Restore(parse(&name, args)?),
            "stat" => Self::Stat(parse(&name, args)?),
            "list" => parse::<Nothing>(&name, args).map(|_| Self::List)?,
            "cache_stat" => parse::<Nothing>(&name, args).map(|_| Self::CacheStat)?,
            "credentials" => Self::Credentials(parse(&name, args)?),
            "subscribe" => parse::<Nothing>(&name, args).map(|_| Self::Subscribe)?,
            _ => {
                let shown: String = name.chars().take(64).collect();
                return Err(Error::new(Code::Unsupported, format!("unknown operation {shown:?}")));
            }
        })
    }

    /// Whether it moves many bytes, so that only a few of them should run at once.
    pub fn is_bulk(&self) -> bool {
        match self {
            Self::Compact(_) | Self::Import(_) | Self::Export(_) | Self::Prefetch(_) => true,
            Self::Seal(seal) => seal.digest,
            _ => false,
        }
    }
}

fn parse<T: DeserializeOwned>(op: &str, args: Value) -> Result<T, Error> {
    serde_json::from_value(args).map_err(|e| Error::invalid(format!("operation {op}: {e}")))
}
