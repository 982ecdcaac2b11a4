//! Messages of `process.Process`, in proto3's JSON mapping: defaults may be omitted or null, integers may be strings, enums
//! may be numbers, bytes are base64. Unknown fields are ignored.

use std::collections::BTreeMap;

use base64::engine::general_purpose::{STANDARD_NO_PAD, URL_SAFE_NO_PAD};
use base64::Engine;
use bytes::{BufMut, Bytes, BytesMut};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};

use super::output::Stream;
use crate::connect::envelope;
use crate::error::RpcError;
use crate::reaper::ExitStatus;

/// What to run.
#[derive(Debug, Clone, Default, Deserialize, Serialize)]
#[allow(missing_docs)]
pub struct ProcessConfig {
    #[serde(default, deserialize_with = "or_default")]
    pub cmd: String,
    #[serde(default, deserialize_with = "or_default")]
    pub args: Vec<String>,
    #[serde(default, deserialize_with = "or_default")]
    pub envs: BTreeMap<String, String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
}

/// Terminal size in characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[allow(missing_docs)]
pub struct Size {
    #[serde(default, deserialize_with = "uint32")]
    pub cols: u32,
    #[serde(default, deserialize_with = "uint32")]
    pub rows: u32,
}

/// A terminal; without a size it gets 80×24.
#[derive(Debug, Clone, Copy, Deserialize)]
#[allow(missing_docs)]
pub struct Pty {
    pub size: Option<Size>,
}

#[derive(Debug, Deserialize)]
#[allow(missing_docs)]
pub struct StartRequest {
    pub process: Option<ProcessConfig>,
    pub pty: Option<Pty>,
    pub tag: Option<String>,
    /// Absent means an open stdin, as clients older than the field expect.
    pub stdin: Option<bool>,
}

/// Which process: `{"pid":42}` or `{"tag":"x"}`.
#[derive(Debug, Clone, Deserialize)]
#[allow(missing_docs)]
pub struct Selector {
    #[serde(default, deserialize_with = "optional_uint32")]
    pub pid: Option<u32>,
    pub tag: Option<String>,
}

/// Requests whose only content is the process: Connect, CloseStdin.
#[derive(Debug, Deserialize)]
#[allow(missing_docs)]
pub struct SelectRequest {
    pub process: Option<Selector>,
}

#[derive(Debug, Deserialize)]
#[allow(missing_docs)]
pub struct UpdateRequest {
    pub process: Option<Selector>,
    pub pty: Option<Pty>,
}

/// Bytes for a process: for its stdin or its terminal.
#[derive(Debug, Deserialize)]
#[allow(missing_docs)]
pub struct ProcessInput {
    #[serde(default, deserialize_with = "optional_bytes")]
    pub stdin: Option<Vec<u8>>,
    #[serde(default, deserialize_with = "optional_bytes")]
    pub pty: Option<Vec<u8>>,
}

#[derive(Debug, Deserialize)]
#[allow(missing_docs)]
pub struct SendInputRequest {
    pub process: Option<Selector>,
    pub input: Option<ProcessInput>,
}

#[derive(Debug, Deserialize)]
#[allow(missing_docs)]
pub struct SendSignalRequest {
    pub process: Option<Selector>,
    #[serde(default, deserialize_with = "signal_number")]
    pub signal: i32,
}

/// One message of a StreamInput stream: start, then data, with keepalives (which have neither) anywhere.
#[derive(Debug, Deserialize)]
#[allow(missing_docs)]
pub struct StreamInputRequest {
    pub start: Option<SelectRequest>,
    pub data: Option<InputData>,
}

#[derive(Debug, Deserialize)]
#[allow(missing_docs)]
pub struct InputData {
    pub input: Option<ProcessInput>,
}

/// A message without fields.
#[derive(Debug, Default, Deserialize, Serialize)]
pub struct Empty {}

#[derive(Debug, Serialize)]
#[allow(missing_docs)]
pub struct ProcessInfo {
    pub config: ProcessConfig,
    pub pid: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
}

#[derive(Debug, Serialize)]
#[allow(missing_docs)]
pub struct ListResponse {
    pub processes: Vec<ProcessInfo>,
}

/// A message of a Start or Connect stream, output excepted (see [`data_frame`]).
#[derive(Debug, Serialize)]
pub struct EventMessage {
    event: Event,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "lowercase")]
enum Event {
    Start { pid: u32 },
    End(EndEvent),
    Keepalive {},
}

/// How a process ended, as clients see it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
#[allow(missing_docs)]
pub struct EndEvent {
    pub exit_code: i32,
    pub exited: bool,
    pub status: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

impl EventMessage {
    /// The first message of a stream.
    pub fn start(pid: u32) -> Self {
        Self { event: Event::Start { pid } }
    }

    /// The last message of a stream.
    pub fn end(end: EndEvent) -> Self {
        Self { event: Event::End(end) }
    }

    /// Keeps idle proxies from cutting the stream.
    pub fn keepalive() -> Self {
        Self { event: Event::Keepalive {} }
    }
}

impl From<ExitStatus> for EndEvent {
    fn from(status: ExitStatus) -> Self {
        let (exit_code, exited, status) = match status {
            ExitStatus::Exited(code) => (code, true, format!("exit status {code}")),
            ExitStatus::Signaled { signal, core_dumped } => {
                let core = if core_dumped { " (core dumped)" } else { "" };
                (-1, false, format!("signal: {}{core}", signal_name(signal)))
            }
        };
        let error = (exit_code != 0).then(|| status.clone());
        Self { exit_code, exited, status, error }
    }
}

/// The frame of an output message, `{"event":{"data":{"stdout":"<base64>"}}}`. Built by hand: it is the only bulky message, and
/// this way its bytes are written once.
pub fn data_frame(stream: Stream, data: &[u8]) -> Bytes {
    let mut frame = BytesMut::with_capacity(64 + data.len().div_ceil(3) * 4);
    frame.put_slice(&[0; 5]);
    frame.put_slice(br#"{"event":{"data":{""#);
    frame.put_slice(stream.field().as_bytes());
    frame.put_slice(br#"":""#);
    // Whole groups of three bytes per block, so that the blocks' encodings concatenate.
    for block in data.chunks(768) {
        let mut encoded = [0; 1024];
        if let Ok(length) = base64::engine::general_purpose::STANDARD.encode_slice(block, &mut encoded) {
            frame.put_slice(&encoded[..length]);
        }
    }
    frame.put_slice(br#""}}}"#);
    envelope::seal(envelope::MESSAGE, frame)
}

/// Signal texts as Go prints them, which is what clients compare with.
fn signal_name(signal: i32) -> String {
    let name = match signal {
        1 => "hangup",
        2 => "interrupt",
        3 => "quit",
        4 => "illegal instruction",
        5 => "trace/breakpoint trap",
        6 => "aborted",
        7 => "bus error",
        8 => "floating point exception",
        9 => "killed",
        10 => "user defined signal 1",
        11 => "segmentation fault",
        12 => "user defined signal 2",
        13 => "broken pipe",
        14 => "alarm clock",
        15 => "terminated",
        other => return format!("signal {other}"),
    };
    name.to_owned()
}

/// Unwraps a message field that proto3 makes optional but the call cannot do without.
///
/// # Errors
/// `invalid_argument` naming the field.
pub fn required<T>(field: Option<T>, name: &str) -> Result<T, RpcError> {
    field.ok_or_else(|| RpcError::invalid_argument(format!("field '{name}' is required")))
}

fn or_default<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(deserializer: D) -> Result<T, D::Error> {
    Option::deserialize(deserializer).map(Option::unwrap_or_default)
}

#[derive(Deserialize)]
#[serde(untagged)]
enum NumberOrText {
    Number(u32),
    Text(String),
}

fn optional_uint32<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u32>, D::Error> {
    match Option::deserialize(deserializer)? {
        None => Ok(None),
        Some(NumberOrText::Number(number)) => Ok(Some(number)),
        Some(NumberOrText::Text(text)) => text.parse().map(Some).map_err(D::Error::custom),
    }
}

fn uint32<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
    optional_uint32(deserializer).map(Option::unwrap_or_default)
}

fn signal_number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<i32, D::Error> {
    match Option::deserialize(deserializer)? {
        None => Ok(0),
        Some(NumberOrText::Number(number)) => i32::try_from(number).map_err(D::Error::custom),
        Some(NumberOrText::Text(text)) => match text.as_str() {
            "SIGNAL_SIGTERM" => Ok(libc::SIGTERM),
            "SIGNAL_SIGKILL" => Ok(libc::SIGKILL),
            "SIGNAL_UNSPECIFIED" => Ok(0),
            _ => Err(D::Error::custom(format!("unknown signal '{text}'"))),
        },
    }
}

/// Standard or URL-safe base64, padded or not.
fn optional_bytes<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Vec<u8>>, D::Error> {
    let Some(text) = Option::<String>::deserialize(deserializer)? else { return Ok(None) };
    let unpadded = text.trim_end_matches('=');
    let engine = if unpadded.contains(['-', '_']) { &URL_SAFE_NO_PAD } else { &STANDARD_NO_PAD };
    engine.decode(unpadded).map(Some).map_err(|error| D::Error::custom(format!("invalid base64: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_the_sdks_send() {
        let request: StartRequest = serde_json::from_str(
            r#"{"process":{"cmd":"/bin/bash","args":["-l"],"cwd":null,"new":1},"pty":{"size":{"cols":"80"}},"stdin":false}"#,
        )
        .expect("valid");
        let process = request.process.expect("process");
        assert_eq!((process.cmd.as_str(), process.args.len(), process.envs.len()), ("/bin/bash", 1, 0));
        assert_eq!(request.pty.and_then(|pty| pty.size), Some(Size { cols: 80, rows: 0 }));
        assert_eq!(request.stdin, Some(false));
    }

    #[test]
    fn signals_are_names_or_numbers() {
        let signal = |text: &str| serde_json::from_str::<SendSignalRequest>(text).map(|request| request.signal);
        assert_eq!(signal(r#"{"signal":"SIGNAL_SIGKILL"}"#).ok(), Some(9));
        assert_eq!(signal(r#"{"signal":15}"#).ok(), Some(15));
        assert_eq!(signal("{}").ok(), Some(0));
        assert!(signal(r#"{"signal":"SIGNAL_SIGFOO"}"#).is_err());
    }

    #[test]
    fn input_is_any_base64() {
        for text in ["/+8=", "_-8=", "_-8"] {
            let input: ProcessInput = serde_json::from_str(&format!(r#"{{"stdin":"{text}"}}"#)).expect("valid");
            assert_eq!(input.stdin.as_deref(), Some(&[0xff, 0xef][..]));
        }
        assert!(serde_json::from_str::<ProcessInput>(r#"{"stdin":"***"}"#).is_err());
    }

    #[test]
    fn data_frames_are_ordinary_json_of_any_length() {
        for length in [0, 1, 2, 767, 768, 769, 40_000] {
            let data: Vec<u8> = (0..length).map(|i| i as u8).collect();
            let frame = data_frame(Stream::Stderr, &data);
            let value: serde_json::Value = serde_json::from_slice(&frame[5..]).expect("json");
            let text = value["event"]["data"]["stderr"].as_str().expect("text");
            assert_eq!(base64::engine::general_purpose::STANDARD.decode(text).expect("base64"), data);
        }
    }

    #[test]
    fn end_events() {
        let json = |status| serde_json::to_string(&EventMessage::end(EndEvent::from(status))).expect("json");
        assert_eq!(
            json(ExitStatus::Exited(0)),
            r#"{"event":{"end":{"exitCode":0,"exited":true,"status":"exit status 0"}}}"#
        );
        assert_eq!(
            json(ExitStatus::Signaled { signal: 9, core_dumped: false }),
            r#"{"event":{"end":{"exitCode":-1,"exited":false,"status":"signal: killed","error":"signal: killed"}}}"#
        );
        assert_eq!(serde_json::to_string(&EventMessage::keepalive()).expect("json"), r#"{"event":{"keepalive":{}}}"#);
    }
}
