//! What a capture did and where its time went.

use std::time::Duration;

use overlaybd::Digest;
use serde::{Serialize, Serializer};

use super::Method;

/// A capture that was made. Every dirty page, and every other page that was looked at because a newer layer of the base holds
/// it, is counted once in `data_pages`, `zero_pages` or `equal_pages`.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// How dirty pages were found.
    pub method: Method,
    /// Pages the guest has written since it started.
    pub dirty_pages: u64,
    /// Pages whose bytes are in the layer.
    pub data_pages: u64,
    /// Pages of zeroes.
    pub zero_pages: u64,
    /// Those of them that the layer says are zero, as the base holds something else there.
    pub zeroed_pages: u64,
    /// Pages that were found to be as in the base.
    pub equal_pages: u64,
    /// Bytes of pages in the layer.
    pub written_bytes: u64,
    /// Bytes of the layer's file.
    pub layer_bytes: u64,
    /// Entries of the layer's index.
    pub extents: u64,
    /// The layer's SHA-256, if it was asked for.
    #[serde(serialize_with = "digest", skip_serializing_if = "Option::is_none")]
    pub digest: Option<Digest>,
    /// Where the time went.
    #[serde(flatten)]
    pub times: Times,
}

/// Where a capture's time went. Steps that ran in several threads at once are added up, so they may exceed the total.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Times {
    /// From start to end, without waiting for the guest's stop.
    #[serde(rename = "milliseconds", serialize_with = "milliseconds")]
    pub total: Duration,
    /// Checking the request, the process and its mappings, and opening the output.
    #[serde(rename = "prepare_milliseconds", serialize_with = "milliseconds")]
    pub prepare: Duration,
    /// From then (and, in stages, from the guest's stop) until nothing more was needed of the guest.
    #[serde(rename = "copy_milliseconds", serialize_with = "milliseconds")]
    pub copy: Duration,
    /// Finding dirty pages.
    #[serde(rename = "scan_milliseconds", serialize_with = "milliseconds")]
    pub scan: Duration,
    /// Copying pages out of the process.
    #[serde(rename = "read_milliseconds", serialize_with = "milliseconds")]
    pub read: Duration,
    /// Looking for zeroes, and reading the base and comparing with it.
    #[serde(rename = "compare_milliseconds", serialize_with = "milliseconds")]
    pub compare: Duration,
    /// Writing pages to the layer.
    #[serde(rename = "write_milliseconds", serialize_with = "milliseconds")]
    pub write: Duration,
    /// Writing the index, waiting for the digest and for stable storage, naming the file.
    #[serde(rename = "finish_milliseconds", serialize_with = "milliseconds")]
    pub finish: Duration,
}

fn milliseconds<S: Serializer>(time: &Duration, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_f64(time.as_micros() as f64 / 1000.0)
}

fn digest<S: Serializer>(digest: &Option<Digest>, to: S) -> Result<S::Ok, S::Error> {
    match digest {
        Some(digest) => to.collect_str(digest),
        None => to.serialize_none(),
    }
}
