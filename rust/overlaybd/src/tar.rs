//! Finding the layer inside the tar archive that registries carry it in.
//!
//! A layer blob made by overlaybd's tools is a tar with one file, `overlaybd.commit`, preceded by a pax
//! header with its size (`src/overlaybd/tar/tar_file.cpp`).

use std::io;
use std::sync::Arc;

use crate::{ByteSource, Window};

const BLOCK: usize = 512;
/// Headers looked at before giving up: a layer blob has two.
const MAX_HEADERS: usize = 16;
/// Largest pax header read.
const MAX_PAX: u64 = 64 * 1024;

/// Why a tar archive gives no layer.
#[derive(Debug, thiserror::Error, displaydoc::Display)]
pub enum TarError {
    /// tar header at byte {0} is damaged
    Header(u64),
    /// the tar archive holds no regular file within its first headers
    NoFile,
    /// the file in the tar archive is longer than the archive
    Truncated,
    /// reading the tar archive failed
    Io(#[from] io::Error),
}

/// The first regular file of a tar archive, or the source itself if it is no archive.
///
/// # Errors
/// [`TarError`] if it is an archive but has no such file.
pub fn unwrap_tar(source: Arc<dyn ByteSource>) -> Result<Arc<dyn ByteSource>, TarError> {
    if source.size() < BLOCK as u64 {
        return Ok(source);
    }
    let mut at = 0;
    let mut pax_size = None;
    for number in 0..MAX_HEADERS {
        if source.size().saturating_sub(at) < BLOCK as u64 {
            return Err(TarError::NoFile);
        }
        let mut header = [0u8; BLOCK];
        source.read_exact_at(&mut header, at)?;
        if &header[257..262] != b"ustar" || !checksum_matches(&header) {
            return if number == 0 { Ok(source) } else { Err(TarError::Header(at)) };
        }
        let size = octal(&header[124..136]).ok_or(TarError::Header(at))?;
        let body = at + BLOCK as u64;
        match header[156] {
            b'0' | 0 => {
                let size = pax_size.unwrap_or(size);
                return Window::new(source, body, size)
                    .map(|file| Arc::new(file) as Arc<dyn ByteSource>)
                    .ok_or(TarError::Truncated);
            }
            b'x' if size <= MAX_PAX => {
                let mut records = vec![0u8; size as usize];
                source.read_exact_at(&mut records, body)?;
                pax_size = pax_file_size(&records).or(pax_size);
            }
            _ => {}
        }
        let next = size.checked_next_multiple_of(BLOCK as u64).and_then(|size| body.checked_add(size));
        at = next.ok_or(TarError::Header(at))?;
    }
    Err(TarError::NoFile)
}

/// Sum of the header's bytes with the checksum field taken as spaces.
fn checksum_matches(header: &[u8; BLOCK]) -> bool {
    let sum: u64 = header.iter().map(|byte| u64::from(*byte)).sum();
    let field: u64 = header[148..156].iter().map(|byte| u64::from(*byte)).sum();
    octal(&header[148..156]) == Some(sum - field + 8 * u64::from(b' '))
}

/// A number in octal text, padded with spaces or NULs.
fn octal(field: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(field).ok()?;
    let digits = text.trim_matches(['\0', ' ']);
    match digits.is_empty() {
        true => Some(0),
        false => u64::from_str_radix(digits, 8).ok(),
    }
}

/// The `size` record of a pax header: `<length> size=<bytes>\n`.
fn pax_file_size(records: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(records).ok()?;
    text.lines().find_map(|line| line.split_once(' ')?.1.strip_prefix("size=")?.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemorySource;

    fn header(kind: u8, size: u64) -> [u8; BLOCK] {
        let mut block = [0u8; BLOCK];
        block[..16].copy_from_slice(b"overlaybd.commit");
        block[124..135].copy_from_slice(format!("{size:011o}").as_bytes());
        block[156] = kind;
        block[257..262].copy_from_slice(b"ustar");
        block[148..156].fill(b' ');
        let sum: u64 = block.iter().map(|byte| u64::from(*byte)).sum();
        block[148..154].copy_from_slice(format!("{sum:06o}").as_bytes());
        block
    }

    fn unwrapped(archive: Vec<u8>) -> Result<Vec<u8>, TarError> {
        let file = unwrap_tar(Arc::new(MemorySource::new(archive)))?;
        let mut bytes = vec![0; file.size() as usize];
        file.read_exact_at(&mut bytes, 0)?;
        Ok(bytes)
    }

    #[test]
    fn finds_the_layer_as_overlaybd_writes_it() {
        // A pax header whose record overrides the size 0 of the file's own header.
        let record = b"17 size=00000005\n";
        let mut archive = header(b'x', record.len() as u64).to_vec();
        archive.extend_from_slice(record);
        archive.resize(2 * BLOCK, 0);
        archive.extend_from_slice(&header(b'0', 0));
        archive.extend_from_slice(b"layer");
        archive.resize(6 * BLOCK, 0);
        assert_eq!(unwrapped(archive).expect("tar"), b"layer");
    }

    #[test]
    fn anything_else_is_left_alone_or_refused() {
        assert_eq!(unwrapped(vec![7; 2000]).expect("plain"), vec![7; 2000]);
        assert_eq!(unwrapped(vec![7; 3]).expect("plain"), vec![7; 3]);
        assert!(matches!(unwrapped(header(b'0', 100).to_vec()), Err(TarError::Truncated)));
        assert!(matches!(unwrapped(header(b'5', 0).to_vec()), Err(TarError::NoFile)));
        assert!(matches!(unwrapped(header(b'5', 0o777_7777_7777).to_vec()), Err(TarError::NoFile)));
        let damaged = [header(b'5', 0).to_vec(), vec![1; BLOCK]].concat();
        assert!(matches!(unwrapped(damaged), Err(TarError::Header(512))));
    }
}
