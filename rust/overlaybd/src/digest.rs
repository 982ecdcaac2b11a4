//! SHA-256 of a layer's bytes, computed while they are written or read.

use std::fmt;
use std::io::{self, Write};

use sha2::{Digest as _, Sha256};

use crate::ByteSource;

/// A SHA-256 digest, shown as lower-case hexadecimal.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Digest(pub [u8; 32]);

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A writer that hashes what passes through it.
pub struct DigestWriter<W> {
    inner: W,
    hash: Sha256,
}

impl<W: Write> DigestWriter<W> {
    /// Hashes everything written to `inner` from here on.
    pub fn new(inner: W) -> Self {
        Self { inner, hash: Sha256::new() }
    }

    /// The writer, and the digest of what it was given.
    pub fn finish(self) -> (W, Digest) {
        (self.inner, Digest(self.hash.finalize().into()))
    }
}

impl<W: Write> Write for DigestWriter<W> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        let written = self.inner.write(buf)?;
        self.hash.update(&buf[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

/// The digest of a whole source, read once in order.
///
/// # Errors
/// The source failed.
pub fn sha256(source: &dyn ByteSource) -> io::Result<Digest> {
    let mut hash = Sha256::new();
    let mut buf = vec![0u8; 256 * 1024];
    let mut offset = 0;
    while offset < source.size() {
        let step = (source.size() - offset).min(buf.len() as u64) as usize;
        source.read_exact_at(&mut buf[..step], offset)?;
        hash.update(&buf[..step]);
        offset += step as u64;
    }
    Ok(Digest(hash.finalize().into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writing_and_reading_agree_with_the_published_vector() {
        let mut writer = DigestWriter::new(Vec::new());
        writer.write_all(b"abc").expect("memory");
        let (bytes, digest) = writer.finish();
        assert_eq!(digest.to_string(), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        assert_eq!(sha256(&crate::MemorySource::new(bytes)).expect("memory"), digest);
    }
}
