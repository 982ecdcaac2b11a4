//! Layer identifiers.

use std::fmt;
use std::io;

/// A layer identifier, stored on disk as upper-case text.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Uuid([u8; 16]);

/// Why text is not a UUID.
#[derive(Debug, PartialEq, Eq, thiserror::Error, displaydoc::Display)]
pub enum UuidError {
    /// a UUID must be 36 characters of the form 8-4-4-4-12 hexadecimal digits, got {0:?}
    Malformed(String),
}

impl Uuid {
    /// Bytes of the on-disk field: 36 characters and a NUL.
    pub const FIELD: usize = 37;
    /// The identifier of nothing: written where there is no parent.
    pub const NIL: Uuid = Uuid([0; 16]);

    /// A new random (version 4) identifier.
    ///
    /// # Errors
    /// The kernel's random source failed.
    pub fn random() -> io::Result<Self> {
        let mut bytes = [0u8; 16];
        let mut filled = 0;
        while filled < bytes.len() {
            filled += rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty())?;
        }
        bytes[6] = (bytes[6] & 0x0f) | 0x40;
        bytes[8] = (bytes[8] & 0x3f) | 0x80;
        Ok(Self(bytes))
    }

    /// The identifier made of these bytes, most significant first.
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// Whether this is [`Uuid::NIL`].
    pub fn is_nil(&self) -> bool {
        *self == Self::NIL
    }

    /// Parses the textual form, in either case.
    ///
    /// # Errors
    /// [`UuidError::Malformed`] with the text.
    pub fn parse(text: &str) -> Result<Self, UuidError> {
        let malformed = || UuidError::Malformed(text.chars().take(64).collect());
        if text.len() != 36 {
            return Err(malformed());
        }
        let mut bytes = [0u8; 16];
        let mut digits = 0;
        for (position, byte) in text.bytes().enumerate() {
            if matches!(position, 8 | 13 | 18 | 23) {
                if byte != b'-' {
                    return Err(malformed());
                }
                continue;
            }
            let digit = char::from(byte).to_digit(16).ok_or_else(malformed)?;
            bytes[digits / 2] = (bytes[digits / 2] << 4) | digit as u8;
            digits += 1;
        }
        Ok(Self(bytes))
    }

    /// Reads the on-disk field. An empty or unreadable one is [`Uuid::NIL`], as overlaybd treats it.
    pub(crate) fn from_field(field: &[u8]) -> Self {
        std::str::from_utf8(field)
            .ok()
            .and_then(|text| Self::parse(text.trim_end_matches('\0')).ok())
            .unwrap_or(Self::NIL)
    }

    /// The on-disk field.
    pub(crate) fn to_field(self) -> [u8; Self::FIELD] {
        let mut field = [0u8; Self::FIELD];
        field[..36].copy_from_slice(self.to_string().as_bytes());
        field
    }
}

impl fmt::Display for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (position, byte) in self.0.iter().enumerate() {
            if matches!(position, 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02X}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_and_back() {
        let text = "0F1E2D3C-4B5A-6978-8796-A5B4C3D2E1F0";
        let uuid = Uuid::parse(text).expect("valid");
        assert_eq!(uuid.to_string(), text);
        assert_eq!(Uuid::parse(&text.to_lowercase()), Ok(uuid));
        assert_eq!(Uuid::from_field(&uuid.to_field()), uuid);
        assert_eq!(uuid.to_field()[36], 0);
    }

    #[test]
    fn random_is_version_4_and_new_each_time() {
        let (a, b) = (Uuid::random().expect("random"), Uuid::random().expect("random"));
        assert_ne!(a, b);
        assert_eq!(&a.to_string()[14..15], "4");
    }

    #[test]
    fn rejects_what_is_no_uuid() {
        for text in ["", "0F1E2D3C", "0F1E2D3C-4B5A-6978-8796-A5B4C3D2E1FG", "0F1E2D3C44B5A-6978-8796-A5B4C3D2E1F0"] {
            assert!(Uuid::parse(text).is_err(), "{text}");
            assert!(Uuid::from_field(text.as_bytes()).is_nil());
        }
    }
}
