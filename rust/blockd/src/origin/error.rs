//! Why bytes cannot be had from an origin.

use std::io;
use std::sync::Arc;
use std::time::Duration;

/// A failed request to an origin. Messages never show a URL's query nor any header: both carry secrets.
#[derive(Debug, thiserror::Error, displaydoc::Display)]
pub enum OriginError {
    /// the URL is not usable: {0}
    Url(String),
    /// the header {0} is not usable
    Header(String),
    /// no HTTP client can be made: {0}
    Client(String),
    /// the request failed: {0}
    Request(String),
    /// nothing arrived for {0:?}
    Stalled(Duration),
    /// not done within {0:?}
    TooSlow(Duration),
    /// the origin answered {0}
    Status(u16),
    /// the origin answered {0}, retry after {1:?}
    Busy(u16, Duration),
    /// the origin refused the credentials ({0})
    Unauthorized(u16),
    /// the origin refused the credentials ({0}), and new ones could not be had: {1}
    Refresh(u16, String),
    /// the origin sent {0} instead of what was asked for
    WrongRange(String),
    /// the object has {found} bytes at the origin, not the declared {declared}
    WrongSize {
        /// As the attach request says.
        declared: u64,
        /// As the origin says.
        found: u64,
    },
    /// the object changed at the origin: it was {was}, now it is {is}
    Changed {
        /// Validator at first contact.
        was: String,
        /// Validator of the last response.
        is: String,
    },
    /// the body ended {0} bytes early
    Short(u64),
    /// the origin ignores ranges, and the object of {0} bytes is too large to be read whole
    IgnoresRanges(u64),
    /// the origin compressed the response ({0}) although that was not asked for
    Encoded(String),
    /// the redirect is not followed: {0}
    Redirect(String),
    /// the cache is shutting down
    Closed,
}

impl OriginError {
    /// Whether the same request may succeed later without anyone doing anything.
    pub(super) fn is_transient(&self) -> bool {
        match self {
            Self::Request(_) | Self::Stalled(_) | Self::Short(_) | Self::Busy(..) | Self::WrongRange(_) => true,
            Self::Status(status) => *status == 408 || *status >= 500,
            _ => false,
        }
    }

    fn kind(&self) -> io::ErrorKind {
        match self {
            Self::Stalled(_) | Self::TooSlow(_) => io::ErrorKind::TimedOut,
            Self::Unauthorized(_) | Self::Refresh(..) => io::ErrorKind::PermissionDenied,
            _ => io::ErrorKind::Other,
        }
    }
}

/// A failure shared by all readers that waited for the same block.
#[derive(Debug, Clone, thiserror::Error)]
#[error("reading {url}: {error}")]
pub struct SharedError {
    /// Without query.
    pub url: Arc<str>,
    /// What happened.
    #[source]
    pub error: Arc<OriginError>,
}

impl From<SharedError> for io::Error {
    fn from(error: SharedError) -> Self {
        io::Error::new(error.error.kind(), error)
    }
}
