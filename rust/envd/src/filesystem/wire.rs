//! Request and response messages of `filesystem.Filesystem` in proto3 JSON: names in camelCase or snake_case, numbers also as
//! strings, `null` as absent.

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::value::RawValue;

use super::entry::EntryInfo;

/// Stat, MakeDir and Remove.
#[derive(Debug, Deserialize)]
pub struct PathRequest {
    /// As the client names it.
    #[serde(default, deserialize_with = "or_default")]
    pub path: String,
}

/// ListDir.
#[derive(Debug, Deserialize)]
pub struct ListDirRequest {
    /// As the client names it.
    #[serde(default, deserialize_with = "or_default")]
    pub path: String,
    /// Levels; 0 means 1.
    #[serde(default, deserialize_with = "uint32")]
    pub depth: u32,
}

/// Move.
#[derive(Debug, Deserialize)]
pub struct MoveRequest {
    /// What to move.
    #[serde(default, deserialize_with = "or_default")]
    pub source: String,
    /// Its new path, not the directory to put it in.
    #[serde(default, deserialize_with = "or_default")]
    pub destination: String,
}

/// Stat, MakeDir and Move.
#[derive(Debug, Serialize)]
pub struct EntryResponse {
    /// The entry as it is now.
    pub entry: EntryInfo,
}

/// ListDir.
#[derive(Debug, Serialize)]
pub struct ListDirResponse {
    /// JSON array of [`EntryInfo`], encoded while walking: as text a large directory takes a third of the memory.
    pub entries: Box<RawValue>,
}

/// Remove.
#[derive(Debug, Serialize)]
pub struct Empty {}

/// `null` is the default value.
///
/// # Errors
/// What decoding the value fails with.
pub fn or_default<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(deserializer: D) -> Result<T, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

fn uint32<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Number {
        Integer(u32),
        Text(String),
    }
    match Option::deserialize(deserializer)? {
        None => Ok(0),
        Some(Number::Integer(number)) => Ok(number),
        Some(Number::Text(text)) => text.parse().map_err(serde::de::Error::custom),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn depth_in_every_legal_form() {
        let depth = |json: &str| serde_json::from_str::<ListDirRequest>(json).map(|request| request.depth).ok();
        assert_eq!(depth(r#"{"path":"x","depth":3}"#), Some(3));
        assert_eq!(depth(r#"{"path":null,"depth":"3"}"#), Some(3));
        assert_eq!(depth(r#"{"depth":null,"unknown":1}"#), Some(0));
        assert_eq!(depth("{}"), Some(0));
        assert_eq!(depth(r#"{"depth":-1}"#), None);
        assert_eq!(depth(r#"{"depth":4294967296}"#), None);
    }
}
