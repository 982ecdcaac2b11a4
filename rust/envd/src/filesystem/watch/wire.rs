//! Messages of the watching RPCs in proto3 JSON.

use serde::{Deserialize, Serialize};

use super::super::entry::EntryInfo;
use super::super::wire::or_default;

/// WatchDir and CreateWatcher.
#[derive(Debug, Deserialize)]
pub struct WatchRequest {
    /// Directory, as the client names it.
    #[serde(default, deserialize_with = "or_default")]
    pub path: String,
    /// Also what is below subdirectories, those made later included.
    #[serde(default, deserialize_with = "or_default")]
    pub recursive: bool,
    /// Whether events carry the entry as it was when they were read.
    #[serde(default, alias = "includeEntry", deserialize_with = "or_default")]
    pub include_entry: bool,
    /// Whether directories of network file systems are accepted.
    #[serde(default, alias = "allowNetworkMounts", deserialize_with = "or_default")]
    pub allow_network_mounts: bool,
}

/// GetWatcherEvents and RemoveWatcher.
#[derive(Debug, Deserialize)]
pub struct WatcherRequest {
    /// From CreateWatcher.
    #[serde(default, alias = "watcherId", deserialize_with = "or_default")]
    pub watcher_id: String,
}

/// CreateWatcher.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CreateWatcherResponse {
    /// For the other two calls.
    pub watcher_id: String,
}

/// GetWatcherEvents.
#[derive(Debug, Serialize)]
pub struct WatcherEventsResponse {
    /// Since the call before.
    pub events: Vec<FilesystemEvent>,
}

/// A message of the WatchDir stream.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum WatchDirResponse<'a> {
    /// The first one: from now on nothing is missed.
    Start {},
    /// Something happened.
    Filesystem(&'a FilesystemEvent),
    /// Nothing happened, the stream is alive.
    Keepalive {},
}

/// `filesystem.EventType`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[allow(missing_docs)]
pub enum EventType {
    #[serde(rename = "EVENT_TYPE_CREATE")]
    Create,
    #[serde(rename = "EVENT_TYPE_WRITE")]
    Write,
    #[serde(rename = "EVENT_TYPE_REMOVE")]
    Remove,
    #[serde(rename = "EVENT_TYPE_RENAME")]
    Rename,
    #[serde(rename = "EVENT_TYPE_CHMOD")]
    Chmod,
}

/// One change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FilesystemEvent {
    /// Relative to the watched directory; `.` for itself.
    pub name: String,
    /// What happened to it.
    pub r#type: EventType,
    /// What it was when the event was read, if asked for and if it still was.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub entry: Option<EntryInfo>,
}
