//! Stream framing: one flag byte, a big-endian u32 length, the JSON message.

use bytes::{BufMut, Bytes, BytesMut};
use serde::Serialize;

use crate::error::RpcError;

/// Flag of an ordinary message.
pub const MESSAGE: u8 = 0x00;
/// Flag of a compressed message; never negotiated here.
pub const COMPRESSED: u8 = 0x01;
/// Flag of the last message of a stream.
pub const END_STREAM: u8 = 0x02;

const HEADER: usize = 5;

/// Frames one serialised message.
pub fn encode(flags: u8, value: &impl Serialize) -> Bytes {
    let mut frame = BytesMut::with_capacity(128).writer();
    frame.get_mut().put_bytes(0, HEADER);
    // Our wire types have string keys and no fallible Serialize impl, and BytesMut grows.
    let _ = serde_json::to_writer(&mut frame, value);
    seal(flags, frame.into_inner())
}

/// The frame that ends a stream: `{}`, or `{"error":{"code":"…","message":"…"}}`.
pub fn encode_end(error: Option<&RpcError>) -> Bytes {
    #[derive(Serialize)]
    struct EndStream<'a> {
        #[serde(skip_serializing_if = "Option::is_none")]
        error: Option<&'a RpcError>,
    }
    encode(END_STREAM, &EndStream { error })
}

/// Fills in the header of a frame whose first five bytes are reserved.
pub fn seal(flags: u8, mut frame: BytesMut) -> Bytes {
    let length = u32::try_from(frame.len().saturating_sub(HEADER)).unwrap_or(u32::MAX);
    if let Some(header) = frame.first_chunk_mut::<HEADER>() {
        header[0] = flags;
        header[1..].copy_from_slice(&length.to_be_bytes());
    }
    frame.freeze()
}

/// Takes the next whole frame (flags, message) out of `buffer`; `None` when more bytes are needed.
///
/// # Errors
/// `resource_exhausted` as soon as a header announces more than `limit` bytes, `invalid_argument` for unknown or compressed flags.
pub fn decode(buffer: &mut BytesMut, limit: usize) -> Result<Option<(u8, Bytes)>, RpcError> {
    let Some(&[flags, a, b, c, d]) = buffer.first_chunk::<HEADER>() else { return Ok(None) };
    if flags & !END_STREAM != 0 {
        let what = if flags & COMPRESSED != 0 { "compressed messages are not supported" } else { "unknown flags" };
        return Err(RpcError::invalid_argument(format!("malformed envelope: {what} (flags 0x{flags:02x})")));
    }
    let length = u32::from_be_bytes([a, b, c, d]) as usize;
    if length > limit {
        return Err(RpcError::resource_exhausted(format!("message of {length} bytes is larger than {limit} bytes")));
    }
    if buffer.len() < HEADER + length {
        return Ok(None);
    }
    let mut frame = buffer.split_to(HEADER + length);
    let message = frame.split_off(HEADER);
    Ok(Some((flags, message.freeze())))
}

/// How many bytes the frame at the start of `buffer` has in all, once its header is there.
pub fn length(buffer: &[u8]) -> Option<usize> {
    let &[_, a, b, c, d] = buffer.first_chunk::<HEADER>()?;
    Some(HEADER + u32::from_be_bytes([a, b, c, d]) as usize)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Code;

    #[test]
    fn frames_round_trip_byte_by_byte() {
        let wire = [encode(MESSAGE, &serde_json::json!({"a": 1})), encode_end(None)].concat();
        let mut buffer = BytesMut::new();
        let mut seen = Vec::new();
        for byte in wire {
            buffer.put_u8(byte);
            while let Some((flags, message)) = decode(&mut buffer, 100).expect("valid") {
                seen.push((flags, String::from_utf8_lossy(&message).into_owned()));
            }
        }
        assert_eq!(seen, [(MESSAGE, r#"{"a":1}"#.into()), (END_STREAM, "{}".into())]);
        assert!(buffer.is_empty());
    }

    #[test]
    fn refuses_huge_lengths_before_the_bytes_arrive() {
        let mut buffer = BytesMut::from(&[0, 0xff, 0xff, 0xff, 0xff][..]);
        assert_eq!(decode(&mut buffer, 1 << 20).expect_err("too long").code, Code::ResourceExhausted);
    }

    #[test]
    fn refuses_compressed_and_unknown_flags() {
        for flags in [COMPRESSED, 0x80, 0x03] {
            let mut buffer = BytesMut::from(&[flags, 0, 0, 0, 0][..]);
            assert_eq!(decode(&mut buffer, 10).expect_err("refused").code, Code::InvalidArgument);
        }
    }

    #[test]
    fn end_of_stream_carries_the_error() {
        let end = encode_end(Some(&RpcError::not_found("gone")));
        assert_eq!(&end[5..], br#"{"error":{"code":"not_found","message":"gone"}}"#);
    }
}
